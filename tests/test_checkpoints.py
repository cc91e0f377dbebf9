"""Checkpoints of two ranks: resumed on two and on one, and loaded by Transformers, PEFT and the engine."""
import pytest
from shard_run import case  # before torch
import torch
from peft import AutoPeftModelForCausalLM
from small import TOKENIZER, policy, weights
from transformers import AutoModelForCausalLM
from two_ranks import FSDP2, run_ranks

from grpo_colab import toys
from grpo_colab.compat import installed
from grpo_colab.engine import Engine


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return toys.save_toy(tmp_path_factory.mktemp("base"), policy(), TOKENIZER)


def saved(kind, adapter, base, out):
    "Two ranks save; two go on from there to the same bits. Weights at the end."
    env = FSDP2 if kind == "fsdp2" else dict(DS_ACCELERATOR="cpu") if kind.startswith("zero") else {}
    for r in run_ranks("checkpoint_run.py", out, base, kind, adapter, **env): assert r == dict(steps=[4, 4], differ=[])
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
def test_ddp(base, tmp_path):
    ends = saved("ddp", "full", base, tmp_path)
    resumed("full", base, tmp_path, ends)
    exported(tmp_path/"run"/"checkpoint-4", ends)


@pytest.mark.slow
def test_adapter(base, tmp_path):
    ends = saved("ddp", "fold", base, tmp_path)
    resumed("fold", base, tmp_path, ends)
    model = AutoPeftModelForCausalLM.from_pretrained(tmp_path/"run"/"checkpoint-4", dtype=torch.float32)
    assert all(torch.equal(p, ends[n]) for n, p in model.named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp2", *(["zero3"] if installed("deepspeed") else [])])
def test_in_shards(base, tmp_path, kind):
    exported(tmp_path/"run"/"checkpoint-4", saved(kind, "full", base, tmp_path))
