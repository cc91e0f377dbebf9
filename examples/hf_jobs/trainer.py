"""The trainer of a run on Hugging Face Jobs. It starts its replicas as Jobs, trains, and cancels them.

    python trainer.py --bucket me/grpo                        anywhere with a GPU: replicas are reached at exposed ports
    python trainer.py --bucket me/grpo --group grpo-1         in a Job of that network group, as start.py starts it
    python trainer.py --bucket me/grpo --dry-run              print what would be asked of the Hub, and start nothing

Adapters go to hf://buckets/BUCKET/TAG/adapters, which replicas have mounted at /bucket. Everything else is in OUT.
"""
import argparse
import json
import os
from pathlib import Path

from huggingface_hub import HfApi, get_token
from peft import LoraConfig
from transformers import AutoTokenizer

from grpo_colab.async_args import AsyncLoRAGRPOConfig
from grpo_colab.async_lora import AsyncLoRAGRPOTrainer
from grpo_colab.config import ScriptConfig
from grpo_colab.fleet import Fleet
from grpo_colab.hub_jobs import job_request, understood
from grpo_colab.rewards import math_reward
from grpo_colab.train import load_data, write_report
from grpo_colab.vllm_server import vllm_command

SYSTEM = "Solve the problem step by step. End with \"The answer is\" and the number."


def parser():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    def add(name, default, help): p.add_argument(f"--{name}", type=type(default), default=default, help=f"{help} (%(default)s)")
    p.add_argument("--bucket", required=True, metavar="OWNER/NAME", help="a Storage Bucket, private, that is there already")
    add("tag", "grpo-1", "name of the run: its folder in the bucket, and TAG-replicas the label of its replicas")
    add("group", "", "network group that this Job is in; none: replicas expose their port")
    add("model", "Qwen/Qwen2.5-1.5B-Instruct", "hub id")
    add("dataset", "openai/gsm8k", "hub id, with the columns question and answer")
    add("dataset_config", "main", "of the dataset")
    add("namespace", "", "user or organisation that pays for replicas; none: yours")
    add("replicas", 2, "servers, a Job each")
    add("flavor", "h200", "hardware of a replica")
    add("timeout", "4h", "after which replicas end, whatever happened here")
    add("out", "runs/hf_jobs", "for checkpoints and report")
    add("max_steps", 200, "optimizer steps")
    add("batch", 256, "completions a step")
    add("completion", 512, "tokens of a completion at most")
    add("context", 1024, "tokens of question and completion at most")
    add("max_staleness", 4, "steps between sampling and training at most; a mounted bucket shows a version after 10 to 30 s")
    add("lora_rank", 16, "of the adapter, on all linear layers")
    p.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in OUT")
    p.add_argument("--dry-run", action="store_true", help="print the Jobs of the replicas and start nothing")
    return p


def label(a): return f"{a.tag}-replicas"


def servers(a):
    "What vLLM is told, and what a Job has beside it."
    vllm = dict(lora_rank=a.lora_rank, max_staleness=a.max_staleness, max_model_len=a.context, logprobs_mode="processed_logprobs")
    return vllm, dict(volumes={"/bucket": f"hf://buckets/{a.bucket}"})


def requests(a):
    "What `Fleet.jobs` would ask for, without secrets."
    vllm, job = servers(a)
    command = vllm_command(a.model, 8000, "0.0.0.0", python="python3", **vllm)
    jobs = [job_request(i, command, a.flavor, a.timeout, label(a), group=a.group or None, **job) for i in range(a.replicas)]
    return [understood(HfApi.run_job, j) for j in jobs]


def fleet(a):
    "Replicas that are up."
    os.environ.setdefault("HF_TOKEN", get_token() or "")  # replicas load the model with it
    vllm, job = servers(a)
    return Fleet.jobs(a.replicas, a.model, a.flavor, a.timeout, tag=label(a), group=a.group or None, namespace=a.namespace or None,
                      secrets_named=["HF_TOKEN"], job=job, **vllm)


def train(a, replicas):
    "A run on replicas that are up."
    args = AsyncLoRAGRPOConfig(
        a.out, max_steps=a.max_steps, max_staleness=a.max_staleness, per_device_train_batch_size=a.batch,
        max_completion_length=a.completion, adapter_store=f"hf://buckets/{a.bucket}/{a.tag}/adapters",
        store_seen_as=f"/bucket/{a.tag}/adapters", learning_rate=1e-5, lr_scheduler_type="constant_with_warmup", warmup_steps=10,
        logging_steps=1, save_steps=20, save_total_limit=2, report_to="none", trace_path="trace.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(a.model, padding_side="left")
    script = ScriptConfig(a.dataset, a.dataset_config or None, prompt_column="question", system_prompt=SYSTEM)
    lora = LoraConfig(r=a.lora_rank, lora_alpha=2 * a.lora_rank, target_modules="all-linear")
    trainer = AsyncLoRAGRPOTrainer(a.model, math_reward, args, load_data(script, tokenizer), processing_class=tokenizer,
                                   peft_config=lora, fleet=replicas)
    try:
        trainer.train(resume_from_checkpoint=a.resume or None)
        trainer.save_model()
    finally:
        trainer.close(say=False)
        print("report:", write_report(trainer, f"{Path(a.model).name}, {a.replicas} Jobs"))


def main(argv=None):
    a = parser().parse_args(argv)
    if a.dry_run: return print(json.dumps(requests(a), indent=1, default=lambda volume: volume.to_dict()))
    with fleet(a) as replicas: train(a, replicas)


if __name__ == "__main__": main()
