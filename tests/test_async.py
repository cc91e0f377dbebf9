"""Drills of an asynchronous run: what dies, hangs or is full costs what it must, and says so."""
import errno
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from small import TOKENIZER, policy, rows, short  # before torch
import torch
from async_run import SGD, Each, published, trainer
from two_ranks import NEEDS_DEEPSPEED, environment, run_ranks

from grpo_colab import toys
from grpo_colab.fleet import Fleet
from grpo_colab.keeper import kin
from grpo_colab.places import Directory
from grpo_colab.publisher import ask_proxy
from grpo_colab.rollout_worker import WorkerError
from grpo_colab.scoring import RewardTimeout

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return toys.save_toy(tmp_path_factory.mktemp("base"), policy(), TOKENIZER)


@pytest.fixture(scope="module")
def fleet(base):
    "Two real servers and a proxy. Each has a GPU of its own, in name, so that both start at once."
    gpus = [f"toy-{os.getpid()}-{i}" for i in range(2)]
    flags = dict(memory=.2, dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=64, lora_rank=8,
                 num_gpu_blocks_override=200, block_size=16)
    with Fleet.local(2, base, gpus, name="toy", max_staleness=2, progress=False, **flags) as fleet:
        fleet.proxy()
        yield fleet


def until(true, seconds=120):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(.05)


def kill(watched):
    "The server and its engine, not the keeper that watches over them."
    family = kin(watched.keeper.pid)
    assert family
    for p in family: os.kill(p, signal.SIGKILL)


def test_two_replicas(fleet, base, tmp_path):
    "Both sample, no batch is too old, versions that are over are gone from replicas and store."
    t = trainer(base, fleet.proxy(), tmp_path, max_steps=8)
    t.train()
    assert max(r["staleness/max"] for r in rows(t)) <= 2 and len(rows(t)) == 8
    last = t.publisher.wait()
    status = ask_proxy(fleet.proxy(), "/status")
    assert len(status["replicas"]) == 2
    there = {a.version for a in t.publisher.store.list()}  # one that waited for another may have been passed over
    assert last.version == 8 and 8 in there and there <= {6, 7, 8}
    t.close()
    assert [m["id"] for m in ask_proxy(fleet.proxy(), "/v1/models")["data"]] == ["toy"]


@pytest.mark.slow
def test_a_replica_is_killed(fleet, base, tmp_path):
    "The run goes on with the other; the one that comes back has the versions that answer."
    t = trainer(base, fleet.proxy(), tmp_path, max_steps=12)
    starts = fleet.replicas[0].starts
    t.add_callback(Each(lambda step: kill(fleet.replicas[0]) if step == 3 else None))
    t.train()
    assert t.state.global_step == 12
    until(lambda: fleet.replicas[0].starts > starts and fleet.replicas[0].state == "up")
    until(lambda: all(r["state"] == "up" for r in ask_proxy(fleet.proxy(), "/status")["replicas"]))
    t.close()


def test_the_proxy_is_killed(fleet, base, tmp_path):
    "Requests and versions are tried again until it is back; no group is lost for it."
    t = trainer(base, fleet.proxy(), tmp_path, max_steps=8)
    told, killed = t._told, []

    def die(adapter):
        if adapter.version >= 3 and not killed: killed.append(kill(fleet._proxy))
        told(adapter)  # and requests for it begin
    t._told = die
    t.train()
    assert t.state.global_step == 8 and killed and rows(t)[-1]["rollouts/retries"] > 0
    assert not {k: v for k, v in t.worker.hand.dropped.items() if k != "stale"}
    t.close()


def test_a_reward_that_hangs(fleet, base, tmp_path):
    "On one group it costs that group; on all it stops the run, which goes on with a reward that is mended."
    never, hung = threading.Event(), []

    def once(completions, **columns):
        if not hung: hung.append(1) or never.wait()
        return short(completions)

    def always(completions, **columns): never.wait()
    t = trainer(base, fleet.proxy(), tmp_path, once, max_steps=3, reward_timeout=2., max_failed_groups=3)
    t.add_callback(Each(lambda step: until(lambda: t.worker.hand.dropped["reward timeout"]) if step == 2 else None))
    t.train()
    assert t.state.global_step == 3 and t.worker.hand.dropped["reward timeout"] == 1
    t.close()
    t = trainer(base, fleet.proxy(), tmp_path/"2", always, max_steps=3, reward_timeout=.5, max_failed_groups=3)
    with pytest.raises(WorkerError, match="'always' took longer than 0.5 s") as e: t.train()
    assert isinstance(e.value.__cause__, RewardTimeout) and "3 groups failed" in str(e.value.__cause__.__notes__)
    t.reward_funcs = [short]
    t.train()
    assert t.state.global_step == 3
    t.close()
    never.set()


def test_the_store_is_full(fleet, base, tmp_path, monkeypatch):
    "The run stops with a clear word, and goes on when there is room."
    t = trainer(base, fleet.proxy(), tmp_path, max_steps=8, publish_patience=.5)
    put, full = Directory.put, []

    def no_room(self, *args):
        if full: raise OSError(errno.ENOSPC, "No space left on device")
        return put(self, *args)
    monkeypatch.setattr(Directory, "put", no_room)
    t.add_callback(Each(lambda step: full.append(1) if step == 3 else None))
    with pytest.raises(Exception, match="No space left on device.*Make room"): t.train()
    assert 3 <= t.state.global_step < 8
    full.clear()
    t.callback_handler.callbacks = [c for c in t.callback_handler.callbacks if not isinstance(c, Each)]
    t.train()
    assert t.state.global_step == 8
    t.close()


def train(out, *args, code=0):
    "What the steps of a training process were, and how it must end."
    command = [sys.executable, "-W", "ignore", HERE/"async_run.py", out, *args]
    done = subprocess.run(list(map(str, command)), env=os.environ | dict(PYTHONPATH=str(HERE.parent)), text=True, timeout=240,
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == code, done.stdout[-6000:]
    return json.loads((out/"rank0.json").read_text())


@pytest.mark.slow
def test_the_trainer_is_killed(fleet, base, tmp_path):
    "It goes on from its checkpoint: no prompt skipped, none trained on twice, nothing of the dead run left."
    first = train(tmp_path, base, fleet.proxy(), 6, "--kill-at", 5, code=-signal.SIGKILL)
    second = train(tmp_path, base, fleet.proxy(), 8, "--resume")
    assert [[x["step"] for x in steps] for steps in (first, second)] == [[1, 2, 3, 4, 5], [5, 6, 7, 8]]
    prompts = [p for x in first[:4] + second for p in x["prompts"]]
    assert len(prompts) == len(set(prompts)) == 8 * 4
    kept = json.loads((tmp_path/"checkpoint-8"/"prompts.json").read_text())
    assert kept["next"] - len(kept["open"]) == 8 * 4  # all that was begun was trained on, or is in hand
    assert len(list((tmp_path/"adapters").glob("run-*"))) == 1
    assert [m["id"] for m in ask_proxy(fleet.proxy(), "/v1/models")["data"]] == ["toy"]


@pytest.mark.slow
def test_two_ranks(fleet, base, tmp_path):
    "Each rank trains on its half of the batch, and both have the same weights."
    a, b = run_ranks("async_run.py", tmp_path, base, fleet.proxy(), 4)
    assert [x["step"] for x in a] == [1, 2, 3, 4] and [x["weights"] for x in a] == [x["weights"] for x in b]
    assert [len(x["prompts"]) for x in a] == [8] * 4  # 2 × 16 completions, four a prompt


@pytest.mark.slow
def test_two_ranks_start_their_own_server(tmp_path):
    "Rank 0 starts and ends it, both train with it; one that does not start is said on both."
    first, second = run_ranks("own_fleet_run.py", tmp_path)
    for seen in (first, second): assert "FleetError" in seen["refused"] and "no such flag" in seen["refused"]
    assert first["url"] == second["url"] and (first["owner"], second["owner"]) == (True, False)
    assert first["steps"] == 2 and first["weights"] == second["weights"]
    assert first["states"] == ["ended"] and (tmp_path/"base/model.safetensors").exists()


@pytest.fixture(scope="module")
def alone(fleet, base, tmp_path_factory):
    "Two steps of one process: its groups in a file, its log, the adapter after each step."
    out, groups, adapters = tmp_path_factory.mktemp("alone"), [], []
    t = trainer(base, fleet.proxy(), out, max_steps=2, per_device_train_batch_size=32, **SGD)
    t.add_callback(Each(lambda step: (groups.append(t._held[1]), adapters.append(published(t)))))
    t.train()
    (out/"groups.pkl").write_bytes(pickle.dumps(groups))
    yield out/"groups.pkl", rows(t), adapters
    t.close()


def as_one(kind, fleet, base, alone, out):
    "Two ranks on the groups of one process, then on their own: the same loss, and the same adapter on the replicas."
    groups, log, adapters = alone
    a, b = run_ranks("async_ranks.py", out, base, fleet.proxy(), kind, groups, **environment(kind))
    assert a["version"] == 4 and a["padded"] == b["padded"] == ""
    for one, two in zip(log, a["rows"]):
        for name in ("loss", "reward"): assert abs(one[name] - two[name]) < 1e-6
    for step, whole in enumerate(adapters, 1):
        ours = torch.load(out/f"v{step}.pt")
        assert ours.keys() == whole.keys()
        assert max((ours[n] - whole[n]).abs().max() for n in whole) < 1e-6
    assert max((adapters[0][n] - adapters[1][n]).abs().max() for n in whole) > 1e-3  # they move
    return a


def test_fsdp2(fleet, base, alone, tmp_path):
    "All parameters are in shards, the adapter's too."
    found = as_one("fsdp2", fleet, base, alone, tmp_path)
    assert (found["kind"], found["shards"]) == ("FSDP", [True, True])


@pytest.mark.slow
def test_ddp(fleet, base, alone, tmp_path):
    "The whole policy on each."
    assert as_one("ddp", fleet, base, alone, tmp_path)["shards"] == [False, False]


@NEEDS_DEEPSPEED
@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_zero(fleet, base, alone, tmp_path, stage):
    "Stage 3 has all parameters in shards, stage 2 none."
    found = as_one(f"zero{stage}", fleet, base, alone, tmp_path)
    assert (found["kind"], found["stage"], found["shards"]) == ("DEEPSPEED", stage, [stage == 3] * 2)
