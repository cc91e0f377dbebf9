"""One of two ranks fails, is interrupted or killed: both end, soon, with one message. No launcher helps."""
import json
import os
import socket
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import pytest

from run_all import left_behind
from two_ranks import FSDP2

from grpo_colab.keeper import processes

HERE = Path(__file__).resolve().parent


def drill(out, where, how):
    "What each rank printed and its exit code; how many seconds after the fault both had ended; what is left of them."
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = str(s.getsockname()[1])
    env = os.environ | dict(PYTHONPATH=str(HERE.parent), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=port,
                            GLOO_SOCKET_IFNAME="lo")
    if where == "sync": env |= FSDP2
    command, ranks = [sys.executable, "-W", "ignore", HERE/"drill_run.py", out, where, how], []
    for r in range(2):
        with open(out/f"rank{r}.txt", "w") as f:
            ranks.append(subprocess.Popen(list(map(str, command)), env=env | dict(RANK=str(r), LOCAL_RANK=str(r)), start_new_session=True,
                                          stdin=subprocess.DEVNULL, stdout=f, stderr=subprocess.STDOUT))
    until = time.time() + 240
    try:
        while any(p.poll() is None for p in ranks) and time.time() < until: time.sleep(.1)
        ended = time.time()
    finally:
        for p in ranks: p.kill()
    for p in Path("/dev/shm").glob(f"grpo_colab-{port}-*"): p.unlink()  # which vLLM for CPUs leaves when it is killed
    printed = [(out/f"rank{r}.txt").read_text() for r in range(2)]
    assert (out/"fault").exists(), printed
    left, until, family = [left_behind(p.pid) for p in ranks], time.time() + 5, set(json.loads((out/"family").read_text()))
    while family & set(processes()) and time.time() < until: time.sleep(.1)
    left.append(family & set(processes()))
    return printed, [p.wait() for p in ranks], ended - float((out/"fault").read_text()), left


def ends(out, where, how):
    (first, second), codes, seconds, left = drill(out, where, how)
    assert seconds < 30 and codes[0] == 1 and codes[1] != 0 and not any(left), (first, second, codes, seconds, left)
    if how == "kill": assert first.count("all ranks end") == 1 and "Traceback" not in second, (first, second)
    else: assert second.count("all ranks end") == 1 and "Traceback" not in first, (first, second)
    print(f"{where}, {how}: {seconds:.1f} s")


def test_killed_in_backward(tmp_path):
    ends(tmp_path, "backward", "kill")


@pytest.mark.slow
@pytest.mark.parametrize("where, how", [*product(["generate", "sync"], ["error", "interrupt", "kill"]), ("backward", "error"),
                                        ("backward", "interrupt"), ("servers", "error"), ("servers", "kill")])
def test_each(tmp_path, where, how):
    ends(tmp_path, where, how)
