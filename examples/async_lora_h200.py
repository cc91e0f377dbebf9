"""Asynchronous GRPO on one or two H200s: Qwen2.5-1.5B-Instruct learns grade-school maths (GSM8K) with LoRA.

    python examples/async_lora_h200.py                          one GPU: trainer and one replica share it; two: one each
    python examples/async_lora_h200.py --vllm_mode colocate     the same run with the engine in the trainer, which take turns
    python examples/async_lora_h200.py --resume                 go on from the newest checkpoint
    accelerate launch --num_processes 2 examples/async_lora_h200.py --replicas 2      four GPUs: two train, two sample

What it needs: `make setup` on a machine with a GPU of 80 GB or more, math-verify (`pip install math-verify`), and either a
network or local copies: `--model FOLDER --dataset train.jsonl` (columns `question` and `answer`; then `--dataset_config ""`).

What it costs: GPUs x hours, idle or not. The table that each step prints has `step_time`; times --max_steps, and two minutes for
servers to start, that is the length of the run. Try --max_steps 5 first.

How to stop it: Ctrl-C. The servers end with this process, however it ends, `kill -9` included; what was saved stays, and
--resume goes on from it. The report in OUT/report.html says where the time went, for a run that was stopped too.
"""
import argparse
import json
from pathlib import Path

from peft import LoraConfig
from transformers import AutoTokenizer

from grpo_colab.async_args import AsyncLoRAGRPOConfig
from grpo_colab.config import ScriptConfig
from grpo_colab.grpo_trainer import grpo_trainer
from grpo_colab.own_fleet import gpus_for
from grpo_colab.rewards import math_reward
from grpo_colab.train import load_data, write_report
from grpo_colab.vllm_server import visible_gpus

SYSTEM = "Solve the problem step by step. End with \"The answer is\" and the number."


def parser():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    def add(name, default, help): p.add_argument(f"--{name}", type=type(default), default=default, help=f"{help} (%(default)s)")
    add("model", "Qwen/Qwen2.5-1.5B-Instruct", "hub id or folder")
    add("dataset", "openai/gsm8k", "hub id, folder or file with the columns question and answer")
    add("dataset_config", "main", "of a hub dataset")
    add("out", "runs/async_lora_h200", "for checkpoints, adapters, trace and report")
    add("vllm_mode", "server", "server or colocate")
    add("replicas", 1, "servers")
    add("memory", 0., "share of a GPU for vLLM; 0: 0.85, or 0.4 where a trainer is on it too")
    add("max_steps", 200, "optimizer steps")
    add("batch", 256, "completions a step and GPU that trains")
    add("generations", 8, "completions a question")
    add("completion", 512, "tokens of a completion at most")
    add("context", 1024, "tokens of question and completion at most")
    add("max_staleness", 2, "steps between sampling and training at most")
    add("lora_rank", 16, "of the adapter, on all linear layers")
    add("learning_rate", 1e-5, "constant, after ten steps")
    add("seed", 0, "of data order and adapter")
    p.add_argument("--engine_args", type=json.loads, default={}, help="more for vLLM, as JSON: '{\"max_num_seqs\": 512}'")
    p.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in OUT")
    return p


def build(a):
    "The trainer, its servers or engine running."
    args = AsyncLoRAGRPOConfig(
        a.out, vllm_mode=a.vllm_mode, replicas=a.replicas, max_staleness=a.max_staleness, max_steps=a.max_steps, seed=a.seed,
        per_device_train_batch_size=a.batch, num_generations=a.generations, max_completion_length=a.completion,
        vllm_max_model_length=a.context, engine_args=a.engine_args, learning_rate=a.learning_rate, warmup_steps=10,
        lr_scheduler_type="constant_with_warmup", logging_steps=1, save_steps=20, save_total_limit=2, report_to="none",
        log_completions=True, num_completions_to_print=0)
    alone = a.vllm_mode == "server" and set(gpus_for(args)) < set(visible_gpus())  # GPUs on which nobody trains
    args.vllm_gpu_memory_utilization = a.memory or (.85 if alone else .4)
    tokenizer = AutoTokenizer.from_pretrained(a.model, padding_side="left")
    script = ScriptConfig(a.dataset, a.dataset_config or None, prompt_column="question", system_prompt=SYSTEM)
    lora = LoraConfig(r=a.lora_rank, lora_alpha=2 * a.lora_rank, target_modules="all-linear")
    return grpo_trainer(a.model, math_reward, args, load_data(script, tokenizer), processing_class=tokenizer, peft_config=lora)


def main(argv=None):
    a = parser().parse_args(argv)
    trainer = build(a)
    try:
        trainer.train(resume_from_checkpoint=a.resume or None)
        trainer.save_model()
    finally:
        trainer.close(say=False)
        if trainer.is_world_process_zero(): print("report:", write_report(trainer, f"{Path(a.model).name}, {a.vllm_mode}"))


if __name__ == "__main__": main()
