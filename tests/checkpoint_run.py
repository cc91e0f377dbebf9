"""One rank of the checkpoints of `test_shards.py`: four steps with checkpoints, then the last two again from the first of them.

checkpoint_run.py OUT BASE KIND ADAPTER: as `shard_run.py`; the runs are in OUT/run and OUT/again.
"""
import json
import sys
from pathlib import Path

import shard_run  # before torch
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState

from grpo_colab.colocate import ColocateGRPOTrainer


def main(out, base, kind, adapter):
    options = dict(per_device_train_batch_size=8, cls=shard_run.OverFSDP2 if kind == "fsdp2" else ColocateGRPOTrainer)
    if kind != "ddp": options |= dict(optim="adamw_torch", learning_rate=1e-3)  # torch does not load the empty state of SGD in shards
    if kind.startswith("zero"):
        options["deepspeed"] = shard_run.deepspeed(kind)
        options["deepspeed"]["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    ends = []
    for name, checkpoint in (("run", None), ("again", f"{out}/run/checkpoint-2")):
        t = shard_run.case(f"{out}/{name}", base, adapter, 2, max_steps=4, save_strategy="steps", save_steps=2, **options)
        t.train(resume_from_checkpoint=checkpoint)
        ends.append((t.state.global_step, shard_run.whole(t.model)))
        t.close(say=False)
        AcceleratorState._reset_state()
    (_, run), (_, again) = ends
    if dist.get_rank() == 0: torch.save(run, f"{out}/run.pt")
    found = dict(steps=[step for step, _ in ends], differ=[n for n in run if not torch.equal(run[n], again[n])])
    (Path(out)/f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__": main(*sys.argv[1:])
