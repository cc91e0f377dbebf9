"""Two processes train as one does, whatever the policy's shards and however many ranks share an engine. Their checkpoints are resumed
on two and on one, and loaded by Transformers, PEFT and the engine."""
from types import SimpleNamespace
from unittest.mock import patch as replaced

import pytest
from shard_run import case, noted  # before torch
import torch
from peft import AutoPeftModelForCausalLM
from small import TOKENIZER, policy, rows, weights
from transformers import AutoModelForCausalLM
from two_ranks import NEEDS_DEEPSPEED, environment, run_ranks

from grpo_colab import toys
from grpo_colab.engine import Engine


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return toys.save_toy(tmp_path_factory.mktemp("base"), policy(), TOKENIZER)


def as_two_engines(t):
    "Sample as two engines do, the second from the second half of the prompts and with its own seed."
    gen, theirs = t.vllm_generation, t.vllm_generation.generate

    def generate(prompts, images, num_generations, profiler=None):
        parts, calls = [], dict(gen._calls)
        for group in (0, 1):
            gen._calls = dict(calls)
            with replaced.object(gen, "accelerator", SimpleNamespace(process_index=group)):
                parts.append(theirs(prompts[8*group:8*group + 8], images, num_generations, profiler))
        return parts[0][0] + parts[1][0], parts[0][1] + parts[1][1], parts[0][2] + parts[1][2], None
    gen.generate = generate


@pytest.fixture(scope="module")
def alone(base, tmp_path_factory):
    "Function of a case: what one process does; its log, what it samples, its weights after three steps."
    done = {}

    def run(name):
        if name not in done:
            adapter, tp = name.split("-")
            t = case(tmp_path_factory.mktemp("alone"), base, adapter, 1, per_device_train_batch_size=16)
            before = weights(t.model)
            if tp == "1": as_two_engines(t)
            seen = noted(t)
            t.train()
            done[name] = rows(t), seen, weights(t.model), before
            t.close(say=False)
        return done[name]
    return run


def as_one(kind, names, base, alone, out):
    "Two ranks of `kind` beside one process."
    (out/"tmp").mkdir()
    ranks = run_ranks("shard_run.py", out, base, kind, *names, TMPDIR=str(out/"tmp"), **environment(kind))
    for name in names:
        log, seen, ends, before = alone(name)
        a, b = (r[name] for r in ranks)
        assert a["padded"] == b["padded"] == "" and a["lora"] == b["lora"]
        assert [x + y for x, y in zip(a["seen"], b["seen"])] == seen  # the same prompts, and the same completions
        for one, two in zip(log, a["rows"], strict=True):
            for figure in ("loss", "reward", "sampling/importance_sampling_ratio/mean"):
                assert abs(one[figure] - two[figure]) < 1e-5, (name, figure, one, two)
        ours = torch.load(out/f"{name}.pt")
        assert ours.keys() == ends.keys() and max((ours[n] - ends[n]).abs().max() for n in ends) < 1e-5
        assert max((before[n] - ends[n]).abs().max() for n in ends) > 1e-3
        for r in (a, b):
            assert r["differ"] == []  # bit by bit what a sync of the whole policy brings
            assert r["gaps"] and max(r["gaps"]) < 1e-3 and len(r["looked"]) == 3 + (name == "auto-2")  # it syncs again once measured
            assert r["synced"]["planned"]
            if r["sharded"] and name.startswith("slot"): assert r["synced"]["bytes"] == r["adapter"]  # nothing of the base
    assert all(r["left"] == dict(running=False, vllm=False, temporary=[]) for r in ranks)
    return ranks[0]


def in_shards(found, kind, *names):
    "All of a policy is never whole at once: a bucket of 20,000 bytes, or its largest tensor and its adapter."
    for name in names:
        r = found[name]
        assert (r["kind"], r["sync"], r["sharded"]) == (kind, "ShardedSync", True)
        assert 0 < r["whole"] < 40_000


def test_fsdp2(base, alone, tmp_path):
    "Adapters in a slot of an engine that two ranks share."
    in_shards(as_one("fsdp2", ["slot-2"], base, alone, tmp_path), "FSDP", "slot-2")


@pytest.mark.slow
def test_fsdp2_otherwise(base, alone, tmp_path):
    in_shards(as_one("fsdp2", names := ["full-1", "full-2", "fold-1", "fold-2"], base, alone, tmp_path), "FSDP", *names)


@pytest.mark.slow
def test_ddp(base, alone, tmp_path):
    "A policy that is whole on both."
    found = as_one("ddp", names := ["full-2", "full-1", "fold-2", "fold-1", "slot-2", "auto-2"], base, alone, tmp_path)
    assert {(found[n]["kind"], found[n]["sync"]) for n in names} == {("MULTI_CPU", "WeightSync")}


@NEEDS_DEEPSPEED
@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_zero(base, alone, tmp_path, stage):
    "Gradients are accumulated twice. Stage 3 with optimizer and parameters in main memory is in shards; stage 2 is not."
    found = as_one(f"zero{stage}", names := ["full-2", "slot-2", "fold-2", "full-1"], base, alone, tmp_path)
    if stage == 3: in_shards(found, "DEEPSPEED", *names)
    else: assert {(found[n]["kind"], found[n]["sync"]) for n in names} == {("DEEPSPEED", "WeightSync")}


# ---- checkpoints ----

def saved(kind, adapter, base, out):
    "Two ranks save; two go on from there to the same bits. Weights at the end."
    for r in run_ranks("checkpoint_run.py", out, base, kind, adapter, **environment(kind)): assert r == dict(steps=[4, 4], differ=[])
    return torch.load(out/"run.pt")


def resumed(adapter, base, out, ends):
    "One process goes on from the checkpoint of two, and learns what they do."
    t = case(out/"alone", base, adapter, 1, per_device_train_batch_size=16, max_steps=4)
    t.train(resume_from_checkpoint=str(out/"run"/"checkpoint-2"))
    found = weights(t.model)
    t.close(say=False)
    assert t.state.global_step == 4 and max((found[n] - ends[n]).abs().max() for n in ends) < 1e-5


def exported(path, ends):
    "What was saved last is the policy, in Transformers and in an engine that reads it from disk."
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert all(torch.equal(p, ends[n]) for n, p in model.named_parameters())
    prompt = TOKENIZER("abcd>")["input_ids"]
    with Engine(path, max_model_len=32, max_num_seqs=8, enforce_eager=True, dtype="float32", if_running="replace") as engine:
        r = engine.generate([prompt], sampling=dict(temperature=0, max_tokens=6, ignore_eos=True))
    ids = torch.tensor([prompt + r.completion(0).tolist()])
    with torch.no_grad(): logps = model(ids).logits[0, len(prompt) - 1:-1].log_softmax(-1)
    assert (logps.gather(1, ids[0, len(prompt):, None])[:, 0] - torch.tensor(r.completion_logprobs(0))).abs().max() < 1e-4


@pytest.mark.slow
def test_checkpoint_of_ddp(base, tmp_path):
    ends = saved("ddp", "full", base, tmp_path)
    resumed("full", base, tmp_path, ends)
    exported(tmp_path/"run"/"checkpoint-4", ends)


@pytest.mark.slow
def test_checkpoint_of_an_adapter(base, tmp_path):
    ends = saved("ddp", "fold", base, tmp_path)
    resumed("fold", base, tmp_path, ends)
    model = AutoPeftModelForCausalLM.from_pretrained(tmp_path/"run"/"checkpoint-4", dtype=torch.float32)
    assert all(torch.equal(p, ends[n]) for n, p in model.named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp2", pytest.param("zero3", marks=NEEDS_DEEPSPEED)])
def test_checkpoint_in_shards(base, tmp_path, kind):
    exported(tmp_path/"run"/"checkpoint-4", saved(kind, "full", base, tmp_path))
