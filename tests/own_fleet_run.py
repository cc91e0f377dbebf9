"""One rank of a run that starts its own server: first one that does not start, then one that does. For `test_async.py`.

own_fleet_run.py OUT: what each rank saw is in OUT/rank{r}.json.
"""
import json
import os
import sys
from pathlib import Path

import small  # before torch
from peft import LoraConfig

from grpo_colab.async_args import AsyncLoRAGRPOConfig
from grpo_colab.async_lora import AsyncLoRAGRPOTrainer

out = Path(sys.argv[1])


def trainer(**vllm):
    "A policy in memory, which servers have to be given."
    vllm |= dict(enforce_eager=True, max_num_seqs=32, num_gpu_blocks_override=200, block_size=16)
    return small.trainer(out, cls=AsyncLoRAGRPOTrainer, config=AsyncLoRAGRPOConfig, parts=dict(peft_config=LoraConfig(r=8)),
                         vllm_mode="server", replicas=1, replica_gpus=[f"toy-{os.getpid()}"], vllm_gpu_memory_utilization=.2,
                         vllm_max_model_length=64, engine_args=vllm, max_completion_length=6, gradient_checkpointing=False)


def main():
    seen = {}
    try: trainer(no_such_flag=1)
    except Exception as e: seen["refused"] = f"{type(e).__name__}: {e}"
    t = trainer()
    seen |= dict(url=t.url, owner=t.own_fleet is not None)
    t.train()
    seen |= dict(steps=len(small.rows(t)), weights=sum(float(p.detach().double().sum()) for p in t.model.parameters()))
    t.close()
    seen["states"] = [r["state"] for r in t.own_fleet.status()] if t.own_fleet else []
    (out/f"rank{t.accelerator.process_index}.json").write_text(json.dumps(seen))


if __name__ == "__main__": main()
