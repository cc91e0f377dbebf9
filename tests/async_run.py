"""A process that trains asynchronously on a fleet that exists, for tests that kill it or start two ranks of it.

async_run.py OUT BASE PROXY STEPS [--resume] [--kill-at STEP]: what each step trained on is in OUT/rank{r}.json.
"""
import argparse
import json
import os
import signal
from pathlib import Path

import small  # before torch
import torch
from peft import LoraConfig
from transformers import TrainerCallback

from grpo_colab.async_args import AsyncLoRAGRPOConfig
from grpo_colab.async_lora import AsyncLoRAGRPOTrainer


SGD = dict(optim="sgd", learning_rate=.5, lr_scheduler_type="constant", max_grad_norm=0.)  # Adam divides rounding errors


def trainer(base, proxy, out, reward=small.short, cls=AsyncLoRAGRPOTrainer, **changes):
    "A small one, the same in every process."
    torch.manual_seed(0)
    parts = dict(fleet=proxy, peft_config=LoraConfig(r=8, target_modules="all-linear"))
    changes = dict(vllm_mode="server", max_completion_length=6, learning_rate=1e-3, max_staleness=2, gradient_checkpointing=False,
                   request_patience=60., publish_patience=60.) | changes
    return small.trainer(out, str(base), reward, cls=cls, config=AsyncLoRAGRPOConfig, parts=parts, **changes)


class Each(TrainerCallback):
    "Calls `does(step)` after each step."
    def __init__(self, does): self.does = does
    def on_step_end(self, args, state, control, **kwargs): self.does(state.global_step)


def published(t):
    "The adapter of this step, as replicas got it."
    return t.publisher.store.load(t.publisher.wait())


def main():
    p = argparse.ArgumentParser()
    for name in ("out", "base", "proxy"): p.add_argument(name)
    p.add_argument("steps", type=int)
    p.add_argument("--resume", action="store_true")
    p.add_argument("--kill-at", type=int)
    a = p.parse_args()
    t = trainer(a.base, a.proxy, a.out, max_steps=a.steps, save_strategy="steps", save_steps=2, late_groups="wait")
    rank, steps = t.accelerator.process_index, []

    def note(step):
        prompts = [g["row"]["prompt"] for g in t._held[1]] if rank == 0 else None
        total = sum(float(p.detach().double().sum()) for n, p in t.model.named_parameters() if "lora" in n)
        steps.append(dict(step=step, prompts=prompts, weights=total))
        (Path(a.out)/f"rank{rank}.json").write_text(json.dumps(steps))
        if step == a.kill_at: os.kill(os.getpid(), signal.SIGKILL)
    t.add_callback(Each(note))
    t.train(resume_from_checkpoint=True if a.resume else None)
    t.close()


if __name__ == "__main__": main()
