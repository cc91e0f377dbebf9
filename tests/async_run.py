"""A process that trains asynchronously on a fleet that exists, for tests that kill it or start two ranks of it.

async_run.py BASE PROXY OUT STEPS [--resume] [--kill-at STEP]: prints the prompts of each step, one JSON line a step.
"""
import os
os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TORCH_COMPILE_DISABLE="1", VLLM_LOGGING_LEVEL="ERROR")
import argparse
import json
import signal

import torch
from peft import LoraConfig
from transformers import PrinterCallback, TrainerCallback

from grpo_colab import toys
from grpo_colab.async_args import AsyncLoRAGRPOConfig
from grpo_colab.async_lora import AsyncLoRAGRPOTrainer

TOKENIZER = toys.toy_tokenizer()
TASK = toys.reverse_task(n_test=16)
ARGS = dict(per_device_train_batch_size=16, num_generations=4, max_completion_length=6, learning_rate=1e-3, logging_steps=1,
            save_strategy="no", report_to="none", disable_tqdm=True, max_staleness=2, gradient_checkpointing=False, use_cpu=True,
            bf16=False, request_patience=60., publish_patience=60.)


def short(completions, **columns): return [-float(len(c)) for c in completions]


def trainer(base, proxy, out, reward=short, **changes):
    "A small one."
    args = AsyncLoRAGRPOConfig(str(out), **ARGS | changes)
    t = AsyncLoRAGRPOTrainer(str(base), reward, args, TASK.train, processing_class=TOKENIZER, fleet=proxy,
                             peft_config=LoraConfig(r=8, target_modules="all-linear"))
    t.remove_callback(PrinterCallback)
    return t


class Each(TrainerCallback):
    "Calls `does(step)` after each step."
    def __init__(self, does): self.does = does
    def on_step_end(self, args, state, control, **kwargs): self.does(state.global_step)


def main():
    p = argparse.ArgumentParser()
    for name in ("base", "proxy", "out"): p.add_argument(name)
    p.add_argument("steps", type=int)
    p.add_argument("--resume", action="store_true")
    p.add_argument("--kill-at", type=int)
    a = p.parse_args()
    torch.set_num_threads(1)
    t = trainer(a.base, a.proxy, a.out, max_steps=a.steps, save_strategy="steps", save_steps=2, late_groups="wait")

    def say(step):
        prompts = [g["row"]["prompt"] for g in t._held[1]] if t.accelerator.is_main_process else None
        total = sum(float(p.detach().double().sum()) for n, p in t.model.named_parameters() if "lora" in n)
        print(json.dumps(dict(step=step, prompts=prompts, weights=total, rank=t.accelerator.process_index)), flush=True)
        if step == a.kill_at: os.kill(os.getpid(), signal.SIGKILL)
    t.add_callback(Each(say))
    t.train(resume_from_checkpoint=True if a.resume else None)
    t.close()


if __name__ == "__main__": main()
