"""One rank of an asynchronous run whose policy is in shards: it trains on groups of another run, then on its own.

async_ranks.py OUT BASE PROXY KIND GROUPS: KIND is ddp, fsdp2, zero2 or zero3; GROUPS a pickle of the groups of each step, after
which the fleet's own are taken. What the steps were is in OUT/rank{r}.json.
"""
import json
import pickle
import sys
from pathlib import Path

OUT, BASE, PROXY, KIND, GROUPS = sys.argv[1:]
import async_run  # before torch
import torch
from accelerate import PartialState
from accelerate.utils import DistributedType

from grpo_colab.async_lora import AsyncLoRAGRPOTrainer
from grpo_colab.given_groups import GivenGroupsTrainer
from small import rows


class Replay(AsyncLoRAGRPOTrainer):
    "Takes the groups of another run first."
    def __init__(self, *args, **kwargs):
        if KIND == "fsdp2":  # accelerate takes two CPU processes for DDP, whatever its environment says
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        super().__init__(*args, **kwargs)

    def _groups(self, count):
        if (step := self.state.global_step) >= len(given): return GivenGroupsTrainer._groups(self, count)
        self._held = step, given[step]
        return given[step]


given = pickle.loads(Path(GROUPS).read_bytes())
options = dict(async_run.SGD)
if KIND.startswith("zero"):
    zero = dict(stage=int(KIND[-1])) | (dict(stage3_param_persistence_threshold=0) if KIND == "zero3" else {})
    auto = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto")
    options["deepspeed"] = auto | dict(zero_optimization=zero, zero_allow_untested_optimizer=True)
t = async_run.trainer(BASE, PROXY, OUT, cls=Replay, max_steps=len(given) + 2, **options)
rank, state = t.accelerator.process_index, t.accelerator.state
shards = []


def after(step):
    shards.append([any(hasattr(p, name) for name in ("ds_id", "full_tensor")) for p in t.model.parameters()])
    if rank == 0: torch.save(async_run.published(t), f"{OUT}/v{step}.pt")


t.add_callback(async_run.Each(after))
t.train()
name, version = t.adapter(everywhere=True)
t._prove(name, version)
found = dict(kind=state.distributed_type.value, padded=t.padded_because(), rows=rows(t), version=version,
             stage=state.deepspeed_plugin.zero_stage if KIND.startswith("zero") else None,
             shards=[all(shards[-1]), any(shards[-1])])
(Path(OUT)/f"rank{rank}.json").write_text(json.dumps(found))
t.close()
