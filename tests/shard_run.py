"""One rank of `test_shards.py`: it trains a policy in shards, or one that is whole, and looks at what its engine got.

shard_run.py OUT BASE KIND CASE...: KIND is ddp, fsdp2, zero2 or zero3; a CASE "full-1", "fold-2", "slot-2" or "auto-2" is how
the policy is trained and sampled, and how many ranks share an engine.
"""
import contextlib
import json
import sys
from pathlib import Path
from unittest.mock import patch as replaced

from small import policy, rows, temporary, trainer  # before torch
import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from peft import LoraConfig, get_peft_model
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from grpo_colab import compat, generation, sharded
from grpo_colab.colocate import ColocateGRPOConfig, ColocateGRPOTrainer
from grpo_colab.engine import Engine
from grpo_colab.generation import EngineGeneration
from grpo_colab.sharded import shards, whole_bytes
from grpo_colab.weights import WeightSync

SGD = dict(optim="sgd", learning_rate=.5, lr_scheduler_type="constant", max_grad_norm=0.)  # Adam divides rounding errors
LORA = dict(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear")
EngineGeneration.bucket_bytes = 20_000  # of 150,000


def spread(completions, completion_ids, **columns): return [c.count("a") - len(i) / 9 for c, i in zip(completions, completion_ids)]


def case(out, base, adapter, tp, cls=ColocateGRPOTrainer, reward=spread, **options):
    "A trainer of three steps, alike in one process and in two."
    torch.manual_seed(0)
    parts = {} if adapter == "full" else dict(peft_config=LoraConfig(**LORA))
    if adapter == "auto": options["engine_args"] = dict(enable_lora=True, max_lora_rank=8)
    options = dict(lora_sync=adapter if parts else "fold", max_steps=3, token_budget=40, gradient_checkpointing=False, num_generations=4,
                   vllm_tensor_parallel_size=tp, max_completion_length=6) | SGD | options
    return trainer(out, str(base), reward, config=ColocateGRPOConfig, cls=cls, parts=parts, **options)


def noted(t):
    "From now on, every completion that is sampled: a list for each call."
    seen, theirs = [], t.vllm_generation.generate

    def generate(*args, **kwargs):
        seen.append((found := theirs(*args, **kwargs))[1])
        return found
    t.vllm_generation.generate = generate
    return seen


def whole(model):
    "All parameters of a model, on every rank."
    params = dict(model.named_parameters())
    with (shards(model) or contextlib.nullcontext)(list(params.values())) as tensors:
        return {n: getattr(t, "data", t).detach().clone() for n, t in zip(params, tensors)}


def in_engine(engine):
    "This rank's part of what the engine holds."
    held = {n: p.detach().clone() for n, p in compat.engine_module(engine.llm).named_parameters()}
    if engine.args.get("enable_lora"): held |= {f"slot {i}": t.clone() for i, t in enumerate(compat.lora_memory(engine.llm))}
    return held


def differs(t, adapter, tensors):
    "Where the engine is not what a sync of the same policy in one piece makes it."
    t.vllm_generation.sync_weights()
    ours = in_engine(t.engine)
    unset_hf_deepspeed_config()  # or the next model is made in shards
    model = policy() if adapter == "full" else get_peft_model(policy(), LoraConfig(**LORA))
    with torch.no_grad():
        for n, p in model.named_parameters(): p.copy_(tensors[n])
    t.engine._take_back()  # an adapter in a slot trains on its memory
    WeightSync(t.engine, model, "slot" if adapter == "slot" else "fold").sync()
    return [n for n, x in in_engine(t.engine).items() if not torch.equal(x, ours[n])]


def unlike(engine, model):
    "Rank 0 finds folding quicker, the other the slot."
    way = dist.get_rank()
    return dict(fold=dict(sync_s=way, tokens_s=1), slot=dict(sync_s=1 - way, tokens_s=1))


class Sizes:
    "Gathers, and notes how many bytes are whole at once."
    def __init__(self, gather): self.gather, self.sizes = gather, []

    @contextlib.contextmanager
    def __call__(self, params):
        self.sizes.append(sum(map(whole_bytes, params)))
        with self.gather(params) as tensors: yield tensors


def learned(name, out, base, **options):
    "Three steps of a case, and what was seen."
    adapter, tp = name.split("-")
    with replaced.object(generation, "measure_lora", unlike), \
         replaced.object(sharded, "zero3_gather", Sizes(sharded.zero3_gather)) as zero3, \
         replaced.object(sharded, "fsdp2_gather", Sizes(sharded.fsdp2_gather)) as fsdp2:
        t = case(f"{out}/{name}", base, adapter, int(tp), **options)
        seen = noted(t)
        t.train()
        synced = [e["args"] for e in t.trace.events if e["name"] == "sync" and "planned" in e["args"]]
        looked = [e["args"]["looked_at"] for e in t.trace.events if e["name"] == "verify" and "looked_at" in e["args"]]
        gaps = [e["args"]["gap_nats"] for e in t.trace.events if "gap_nats" in e["args"]]
        tensors = whole(t.model)
        sizes = (zero3.sizes + fsdp2.sizes)[:-1]
        differ = differs(t, adapter, tensors)
    if t.accelerator.process_index == 0: torch.save(tensors, f"{out}/{name}.pt")
    found = dict(lora=t.vllm_generation._sync.lora, rows=rows(t), seen=seen, differ=differ, whole=max(sizes, default=0), synced=synced[-1], looked=looked, gaps=gaps,
                 kind=t.accelerator.state.distributed_type.value, sync=type(t.vllm_generation._sync).__name__, padded=t.padded_because(),
                 sharded=shards(t.model) is not None, adapter=sum(whole_bytes(p) for p in t.model.parameters() if p.requires_grad))
    t.close(say=False)
    return found


class OverFSDP2(ColocateGRPOTrainer):
    def __init__(self, *args, **kwargs):  # accelerate takes two CPU processes for DDP, whatever its environment says
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        super().__init__(*args, **kwargs)


def deepspeed(kind):
    "Stage 2 with the optimizer in main memory, stage 3 with parameters there too."
    away = dict(device="cpu")
    zero = dict(stage=2, offload_optimizer=away) if kind == "zero2" else \
        dict(stage=3, offload_optimizer=away, offload_param=away, stage3_param_persistence_threshold=0)
    auto = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto")
    return auto | dict(zero_optimization=zero, zero_allow_untested_optimizer=True, zero_force_ds_cpu_optimizer=False)


def main(out, base, kind, *cases):
    found, options = {}, dict(per_device_train_batch_size=8, cls=OverFSDP2 if kind == "fsdp2" else ColocateGRPOTrainer)
    for name in cases:
        if kind.startswith("zero"): options |= dict(per_device_train_batch_size=4, gradient_accumulation_steps=2, deepspeed=deepspeed(kind))
        found[name] = learned(name, out, base, **options)
        AcceleratorState._reset_state()
    found["left"] = dict(running=Engine.running is not None, vllm=compat.engine_in_process(), temporary=sorted(temporary()))
    (Path(out)/f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__": main(*sys.argv[1:])
