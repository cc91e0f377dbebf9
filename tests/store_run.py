"""One rank of `test_store.py`: an adapter in shards over two ranks, gathered and published by the first."""
import json
import sys

from small import policy
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from grpo_colab import compat
from grpo_colab.adapter_files import adapter_factors, describe_base
from grpo_colab.lora_sync import AdapterStore
from grpo_colab.sharded import fsdp2_gather, zero3_gather

out = sys.argv[1]


def lora():
    "The model with an adapter that is not zero, alike on every rank."
    torch.manual_seed(0)
    model = get_peft_model(policy(), LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear"))
    for n, p in model.named_parameters():
        if "lora_" in n: p.data.copy_(torch.randn(p.shape))
    return model


def fsdp2(model):
    for block in model.get_base_model().get_decoder().layers: fully_shard(block)
    fully_shard(model.get_base_model())
    return model


def zero3(model):
    import deepspeed
    settings = dict(train_batch_size=2, zero_optimization=dict(stage=3, stage3_param_persistence_threshold=0))
    with deepspeed.zero.Init(module=model, config_dict_or_path=settings): return model


def published(store, factors, base):
    "The digest of what the first rank publishes."
    if dist.get_rank(): return None
    with AdapterStore(f"{out}/{store}", base=base, dtype=torch.float32) as s: return s.verify(s.publish(factors, 1)).digest


def watched(gather, sizes):
    "A gather that notes how many numbers it is asked to make whole."
    def noting(params):
        params = list(params)
        sizes.extend(getattr(p, "ds_numel", p.numel()) for p in params)
        return gather(params)
    return noting


def one_kind(shard, gather):
    whole = lora()
    base, of_adapter = describe_base(whole), sum(p.numel() for n, p in whole.named_parameters() if "lora_" in n)
    sharded, sizes = shard(lora()), []
    try: adapter_factors(sharded)
    except ValueError as e: refused = str(e)
    digests = [published("whole", adapter_factors(whole), base),
               published("shards", adapter_factors(sharded, watched(gather, sizes)), base)]
    return dict(digests=digests, refused=refused, gathered=sum(sizes), adapter=of_adapter)


dist.init_process_group("gloo")
kinds = dict(fsdp2=(fsdp2, fsdp2_gather)) | (dict(zero3=(zero3, zero3_gather)) if compat.installed("deepspeed") else {})
result = {name: one_kind(*kind) for name, kind in kinds.items()}
with open(f"{out}/rank{dist.get_rank()}.json", "w") as f: json.dump(result, f)
dist.destroy_process_group()
