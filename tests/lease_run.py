"""Processes that want one run, killed at random while they take, hold and give back its lease: `test_store.py` runs it.

A lock of the kernel (flock) is the referee: who holds the lease must get it at once."""
import fcntl
import os
import random
import signal
import sys
import time
from pathlib import Path

from grpo_colab.adapter_files import AdapterError
from grpo_colab.lease import Lease
from grpo_colab.places import Directory

root, kills = Path(sys.argv[1]), int(sys.argv[2])


def note(name, text):
    with open(root/name, "a") as f: f.write(text)


def trainer():
    lease = Lease(Directory(root, renames=True), "run-m")
    lease.every = .002
    referee = os.open(root/"referee", os.O_CREAT | os.O_RDWR)
    while True:
        try: lease.take()
        except AdapterError:
            time.sleep(.001)
            continue
        try: fcntl.flock(referee, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError: note("two at once", f"{lease.path} ")
        held = lease.holds()
        time.sleep(random.uniform(0, .004))
        if not (held and lease.holds()): note("taken away", f"{lease.path} ")
        note("holdings", "x")
        fcntl.flock(referee, fcntl.LOCK_UN)
        lease.free()


def spawn():
    pid = os.fork()
    if pid: return pid
    random.seed(os.getpid())
    try: trainer()
    finally: os._exit(1)


def said(name): return (root/name).read_text() if (root/name).exists() else ""


trainers = [spawn() for _ in range(4)]
for _ in range(kills):
    before, end = len(said("holdings")), time.monotonic() + 100
    while len(said("holdings")) < before + 3:  # the run goes from hand to hand again
        if time.monotonic() > end: note("stuck", "nobody gets the run ")
        if said("stuck"): break
        time.sleep(random.uniform(0, .01))
    victim = trainers.pop(random.randrange(len(trainers)))
    os.kill(victim, signal.SIGKILL)
    os.waitpid(victim, 0)
    trainers.append(spawn())
for pid in trainers:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
print({name: said(name) for name in ("two at once", "taken away", "stuck")}, len(said("holdings")) >= 3 * kills)
