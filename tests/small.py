"""The smallest policy, task and arguments that train, of one engine shape, so that one vLLM serves a whole test file.

Import it before torch: it decides how many threads torch takes.
"""
import os
os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1", VLLM_CPU_KVCACHE_SPACE="1",
                  TORCH_COMPILE_DISABLE="1")  # an engine starts in 3 s, not 20; the notebooks run the compiled one
import json
import logging
import math
import signal
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch
from transformers import PrinterCallback

from grpo_colab import toys
from grpo_colab.colocate import ColocateGRPOTrainer
from trl import GRPOConfig

torch.set_num_threads(1)  # these models are too small for two, and one keeps sums in one order
logging.getLogger("transformers").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", category=FutureWarning)

TOKENIZER = toys.toy_tokenizer()
TASK = toys.reverse_task(n_train=64, n_test=16)
ARGS = dict(use_vllm=True, vllm_mode="colocate", per_device_train_batch_size=16, per_device_eval_batch_size=16, max_steps=2,
            num_generations=4, max_completion_length=8, vllm_max_model_length=32, learning_rate=3e-3, logging_steps=1,
            save_strategy="no", report_to="none", disable_tqdm=True, bf16=False, use_cpu=True, seed=0)


def policy(seed=0, arch="qwen2", **changes):
    return toys.toy_model(TOKENIZER, arch, hidden=64, layers=1, heads=2, kv_heads=1, seed=seed, **changes)


def short(completions, **columns): return [-float(len(c)) for c in completions]


def trainer(out, model=None, reward=short, data=None, cls=ColocateGRPOTrainer, config=GRPOConfig, parts=None, **changes):
    "A trainer as TRL's snippet builds it. `changes` go into its config, `parts` to the trainer."
    parts = dict(train_dataset=TASK.train if data is None else data, processing_class=TOKENIZER) | (parts or {})
    t = cls(policy() if model is None else model, reward, config(str(out), **ARGS | changes), **parts)
    t.remove_callback(PrinterCallback)
    return t


def weights(model): return {n: p.detach().clone() for n, p in model.named_parameters()}


def changed(before, after): return sorted(n for n in before if not torch.equal(before[n], after[n]))


def rows(t): return [l for l in t.state.log_history if "loss" in l]


def gap(t, prompts=("abcd>", "hgfe>")):
    "Sync, sample, and let Transformers compute the log-probs of the same tokens: the largest difference to the engine's."
    t.vllm_generation.sync_weights()
    model, was = t.model, t.model.training
    model.eval()
    ids = [TOKENIZER(p)["input_ids"] for p in prompts]
    r, worst = t.engine.generate(ids, n=2, sampling=dict(max_tokens=8), seed=0), 0
    for i in range(len(r)):
        prompt, completion = ids[r.group[i]], r.completion(i).tolist()
        with torch.no_grad(): logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1:-1].float()
        ours = logits.log_softmax(-1)[range(len(completion)), completion].numpy()
        worst = max(worst, float(np.abs(ours - r.completion_logprobs(i)).max()))
    model.train(was)
    return worst


def check_trained(t, before, steps=2):
    "What every run of two steps shows: finite losses, weights that moved, an engine that samples as the policy does."
    assert t.state.global_step == steps
    assert [r["step"] for r in rows(t)] == list(range(1, steps + 1))
    for row in rows(t):
        assert math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"]), row
        assert abs(row.get("sampling/importance_sampling_ratio/mean", 1) - 1) < .02, row
    assert changed(before, weights(t.model)), "no weight moved"
    assert gap(t) < 1e-4


def temporary(): return {n for n in os.listdir(tempfile.gettempdir()) if n.startswith("grpo_colab-")}


def child(function, out, seconds=240, killed=False, **arguments):
    """Run a function of `child_runs.py` in a process of its own, which must end in time, and leave no temporary directory
    unless it is to be killed. Its result."""
    folder, tests = Path(out)/"tmp", Path(__file__).parent
    folder.mkdir()
    command = [sys.executable, "-W", "ignore", str(tests/"child_runs.py"), function]
    done = subprocess.run([*command, json.dumps(dict(out=str(out)) | arguments)], text=True, timeout=seconds, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, 
                          env=os.environ | dict(TMPDIR=str(folder), PYTHONPATH=str(tests.parent)))
    assert done.returncode == (-signal.SIGKILL if killed else 0), done.stdout[-6000:]
    if killed: return None
    assert not [p.name for p in folder.iterdir() if p.name.startswith("grpo_colab-")]
    return json.loads(done.stdout.strip().splitlines()[-1])
