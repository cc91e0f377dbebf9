"""What `test_faults.py` runs in a process of its own, because it sends signals or limits the size of files.

    python child_runs.py FUNCTION '{"out": …}'      the last line it prints is its result, as JSON
"""
import json
import os
import random
import resource
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

from small import TASK, changed, rows, trainer, weights
from transformers import TrainerCallback

from grpo_colab.checkpoint import CheckpointError, last_whole_checkpoint
from grpo_colab.colocate import ColocateGRPOConfig
from grpo_colab.interrupt import _Held
from grpo_colab.trace import Span, TraceError, read_trace

RUN = dict(max_steps=8, save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=3, num_generations_eval=2,
           config=ColocateGRPOConfig)


def run(out, **changes):
    "Eight steps, two epochs of four, with evaluations and checkpoints."
    parts = dict(eval_dataset=TASK.test.select(range(8))) | changes.pop("parts", {})
    return trainer(out, data=TASK.train.select(range(16)), parts=parts, **RUN | changes)


def numbers(t):
    names = ("step", "loss", "grad_norm", "reward", "learning_rate", "num_tokens", "entropy")
    return [{k: r.get(k) for k in names} for r in rows(t)]


def whole(out): return [p.name for p in sorted(Path(out).glob("checkpoint-*")) if last_whole_checkpoint(out)[1] == []]


# ---- Ctrl-C ----

PHASES = ("generate", "sync", "reward", "logprobs", "train", "optimizer", "log", "checkpoint", "evaluate", "start", "anywhere")


class Sender:
    "Sends SIGINT to this process at a random moment of the next phase of a given name."
    def __init__(self, seed, seconds):
        self.random, self.seconds, self.phase, self.timer = random.Random(seed), seconds, None, None
    def arm(self, phase):
        self.cancel()
        self.phase, self.after = phase, self.random.randrange(3)
        if phase in ("start", "anywhere"): self.begin(phase, 0)
    def begin(self, phase, after=None):
        if phase != self.phase: return
        if after is None and self.after: self.after -= 1; return
        self.phase = None
        self.timer = threading.Timer(self.random.random() * self.seconds[phase], os.kill, (os.getpid(), signal.SIGINT))
        self.timer.daemon = True
        self.timer.start()
    def cancel(self):
        "Afterwards no interrupt is on its way."
        self.phase = None
        if self.timer:
            self.timer.cancel()
            try: self.timer.join()
            except KeyboardInterrupt: self.timer.join()


class AtLog(TrainerCallback):
    def __init__(self, sender): self.sender = sender
    def on_log(self, *args, **kwargs): self.sender.begin("log")


def watch(sender):
    "Let the sender know of every span that begins."
    enter = Span.__enter__
    def told(self):
        sender.begin(self.name)
        return enter(self)
    Span.__enter__ = told


def interrupts(out, seed, number, **options):
    "Runs until `number` interrupts were raised, each followed by train() again; compares with a run that had none."
    t = run(f"{out}/undisturbed", **options)
    start = time.time()
    t.train()
    seconds = dict(start=.03, anywhere=time.time() - start, log=.005)
    for e in t.trace.events:
        if e["ph"] == "X": seconds[e["name"]] = max(e["dur"] / 1e6, .0005)  # of the last, which compiled nothing
    expected, curve, hits, faults = weights(t.model), numbers(t), [], []
    sender = Sender(seed, seconds)
    watch(sender)
    handler, runs, due = signal.getsignal(signal.SIGINT), 0, []
    while len(hits) < number and runs < 3 * number:
        runs += 1
        t = run(f"{out}/run{runs}", parts=dict(callbacks=[AtLog(sender)]), **options)
        done, tries = False, 0
        while not done and tries < 40:
            if not due: due = sender.random.sample(PHASES, len(PHASES))
            tries += 1
            phase = due.pop()
            try:
                if len(hits) < number: sender.arm(phase)
                t.train()
                done = True
                sender.cancel()
            except KeyboardInterrupt:
                sender.cancel()
                hits.append((phase, t.state.global_step))
            if t.engine.llm.llm_engine.has_unfinished_requests(): faults.append(f"{hits[-1]}: requests are left in the engine")
            if signal.getsignal(signal.SIGINT) is not handler: faults.append(f"{hits[-1]}: the signal's handler was not put back")
            if _Held.depth or _Held.pending: faults.append(f"{hits[-1]}: Ctrl-C is still held back")
        if not done: faults.append(f"run {runs} did not end")
        if diff := changed(expected, weights(t.model)): faults.append(f"run {runs}, {hits[-4:]}: {len(diff)} weights differ")
        if numbers(t) != curve: faults.append(f"run {runs}, {hits[-4:]}: the log differs")
        if last_whole_checkpoint(t.args.output_dir)[1]: faults.append(f"run {runs}: a checkpoint is not whole")
        read_trace(t.trace.path)
    return dict(hits=hits, runs=runs, faults=faults)


# ---- a disk that fills, a process that is killed ----

class AtStep(TrainerCallback):
    "Calls a function once: when a step begins, or when it was counted."
    def __init__(self, step, call, end=False): self.step, self.calls, self.end = step, [call], end
    def on_step_begin(self, args, state, control, **kwargs):
        if not self.end and state.global_step + 1 == self.step and self.calls: self.calls.pop()()
    def on_step_end(self, args, state, control, **kwargs):
        if self.end and state.global_step == self.step and self.calls: self.calls.pop()()


def limit(size=-1):
    "No file of this process may grow beyond `size` bytes, as if the disk were full; -1: any size."
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def full_disk(out):
    "The disk is full at many moments of a step and of a checkpoint; then there is room again and train() goes on."
    t = run(f"{out}/undisturbed", trace_path=f"{out}/undisturbed.jsonl")
    t.train()
    expected, curve, faults, told, parts = weights(t.model), numbers(t), [], [], ("model.safetensors", "optimizer.pt")
    sizes = [os.path.getsize(f"{out}/undisturbed/checkpoint-2/{p}") for p in parts]
    cases = [("trace", room) for room in range(0, 2400, 150)] + [("checkpoint", size - 1000) for size in sorted(sizes)]
    for kind, size in cases:
        d, trace = f"{out}/{kind}{size}", f"{out}/{kind}{size}.jsonl"
        fill = AtStep(3, lambda: limit(size + (os.path.getsize(trace) if kind == "trace" else 0)))
        t = run(d, trace_path=trace, parts=dict(callbacks=[fill]), save_strategy="no" if kind == "trace" else "steps")
        try: t.train()
        except (TraceError, CheckpointError) as e: told.append((kind, type(e).__name__, str(e), t.state.global_step))
        else: faults.append(f"{kind} {size}: nothing was noticed")
        finally: limit()
        lines = Path(trace).read_text().splitlines(keepends=True)
        if not all(line.endswith("\n") and json.loads(line) for line in lines): faults.append(f"{kind} {size}: the trace is not whole")
        if kind == "checkpoint" and whole(d) != ["checkpoint-2"]: faults.append(f"{size}: checkpoints {os.listdir(d)}")
        t.train()
        if diff := changed(expected, weights(t.model)): faults.append(f"{kind} {size}, {told[-1]}: {len(diff)} weights differ")
        if kind == "checkpoint" and numbers(t) != curve: faults.append(f"{size}: the log differs")
    return dict(faults=faults, told=told)


def killed(out):
    """Killed, by SIGKILL, when the last file of the second checkpoint is opened; what is there when each of the others is
    opened is copied first."""
    copying = []
    def opened(event, args):
        if event != "open" or copying or "checkpoint-4/" not in (path := str(args[0])): return
        if path.endswith("/trainer_state.json"): os.kill(os.getpid(), signal.SIGKILL)
        copying.append(path)
        shutil.copytree(f"{out}/run", f"{out}/left-{Path(path).name}", dirs_exist_ok=True)
        copying.clear()
    sys.addaudithook(opened)
    run(f"{out}/run").train()


if __name__ == "__main__":
    result = globals()[sys.argv[1]](**json.loads(sys.argv[2]))
    print(json.dumps(result), flush=True)
