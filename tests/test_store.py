"""The adapter store between processes: an adapter in shards over two ranks, and trainers that fight for one run."""
import os
import subprocess
import sys
from pathlib import Path

import pytest
from two_ranks import run_ranks

from grpo_colab.compat import installed

HERE = Path(__file__).resolve().parent
KINDS = ["fsdp2", *(["zero3"] if installed("deepspeed") else [])]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    "Run `store_run.py` on two ranks; what each found."
    return run_ranks("store_run.py", tmp_path_factory.mktemp("store"))


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_in_shards(ranks, kind):
    "What is published is what the same adapter in one piece is, byte for byte; nothing but the adapter is gathered."
    whole, shards = ranks[0][kind]["digests"]
    assert whole == shards and len(whole) == 64
    for r in ranks: assert r[kind]["gathered"] == r[kind]["adapter"] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_half_an_adapter_is_refused(ranks, kind):
    "Without a gather no rank goes on with the part it has."
    for r in ranks: assert "the policy is in shards" in r[kind]["refused"]


def test_trainers_that_are_killed_never_hold_a_run_together(tmp_path):
    "And after every kill somebody gets it."
    done = subprocess.run([sys.executable, HERE/"lease_run.py", tmp_path, "60"], capture_output=True, text=True,
                          env=os.environ | dict(PYTHONPATH=str(HERE.parent)))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "{'two at once': '', 'taken away': '', 'stuck': ''} True"
