"""One rank of `test_drills.py`: rank 1 fails in the second step.

drill_run.py OUT WHERE HOW: WHERE is generate (an engine over both ranks), sync (of a policy in FSDP2's shards), backward, or
servers (backward too, while a server that rank 0 has started samples); HOW is error, interrupt or kill. OUT/fault has the time,
OUT/family the processes that rank 0 has started.
"""
import json
import os
import signal
import sys
import time
from pathlib import Path

from shard_run import OverFSDP2  # before torch
from small import policy, trainer

from grpo_colab.colocate import ColocateGRPOConfig, ColocateGRPOTrainer
from grpo_colab.fast_rollouts import Stepper
from grpo_colab.keeper import kin
from grpo_colab.sharded import ShardedSync

OUT, WHERE, HOW = sys.argv[1:]


def fail():
    (Path(OUT)/"fault").write_text(str(time.time()))
    if HOW == "error": raise ValueError("a planted error")
    os.kill(os.getpid(), dict(interrupt=signal.SIGINT, kill=signal.SIGKILL)[HOW])


def planted(function, after=0):
    "Fails in the second step, after some calls in it."
    left = [after]

    def call(*args, **kwargs):
        if t.state.global_step == 1:
            left[0] -= 1
            if left[0] == -1: fail()
        return function(*args, **kwargs)
    return call


signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
if WHERE == "servers":
    import own_fleet_run
    t = own_fleet_run.trainer()
else: t = trainer(OUT, policy(), cls=OverFSDP2 if WHERE == "sync" else ColocateGRPOTrainer, config=ColocateGRPOConfig, max_steps=3,
                  per_device_train_batch_size=8, vllm_tensor_parallel_size=2 if WHERE == "generate" else 1, token_budget=64)
if t.accelerator.process_index == 0: (Path(OUT)/"family").write_text(json.dumps(list(kin(os.getpid()))))
if t.accelerator.process_index == 1:
    if WHERE == "generate": Stepper.step = planted(Stepper.step, after=3)
    if WHERE == "sync": ShardedSync._bring = planted(ShardedSync._bring, after=2)
    if WHERE in ("backward", "servers"):
        next(p for p in t.model.parameters() if p.requires_grad).register_hook(planted(lambda grad: grad))
t.train()
