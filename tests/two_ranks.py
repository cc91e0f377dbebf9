"""A script on two processes under torchrun, over gloo on the CPU."""
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_colab.compat import installed
from grpo_colab.keeper import kin

HERE = Path(__file__).resolve().parent
FSDP2 = dict(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2", FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP",
             FSDP_TRANSFORMER_CLS_TO_WRAP="Qwen2DecoderLayer", FSDP_RESHARD_AFTER_FORWARD="true", FSDP_STATE_DICT_TYPE="FULL_STATE_DICT",
             FSDP_CPU_RAM_EFFICIENT_LOADING="false")  # what `accelerate launch` sets
NEEDS_DEEPSPEED = pytest.mark.skipif(not installed("deepspeed"), reason="needs DeepSpeed")


def environment(kind: str) -> dict:
    "What ranks are started with: kind is ddp, fsdp2, zero2 or zero3."
    return FSDP2 if kind == "fsdp2" else dict(DS_ACCELERATOR="cpu") if kind.startswith("zero") else {}


def run_ranks(script: str, out: Path, *args, seconds: float = 300, **env) -> list:
    "What each of two ranks of `script out *args` found, from `out/rank{r}.json`. Both must end in time, with exit code 0."
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", HERE/script, out,
               *args]
    outer = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
    env = outer | dict(PYTHONPATH=str(HERE.parent), GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1") | env
    p = subprocess.Popen(list(map(str, command)), env=env, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT, start_new_session=True)
    try: printed, _ = p.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        for pid in {p.pid} | kin(p.pid): os.kill(pid, signal.SIGKILL)  # ranks have sessions of their own
        raise AssertionError(f"not done after {seconds} s:\n{p.communicate()[0][-4000:]}") from None
    assert p.returncode == 0, printed[-6000:]
    return [json.loads((out/f"rank{r}.json").read_text()) for r in range(2)]
