"""One rank of `test_ranks.py`: an engine that does not start, one engine over both ranks (TP), one on each (DP)."""
import json
import os
import sys

from small import TOKENIZER, rows, temporary, trainer, weights
import torch
import torch.distributed as dist
from grpo_colab import compat
from grpo_colab.colocate import ColocateGRPOConfig
from grpo_colab.engine import Engine, EngineError

out = sys.argv[1]


def logprobs(model, prompt, completion):
    with torch.no_grad(): logits = model.eval()(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1:-1].float()
    return logits.log_softmax(-1)[range(len(completion)), completion]


def left():
    "What is there when no engine should be: accelerate's process group, and nothing else."
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    return dict(sum=total.item(), vllm=compat.engine_in_process(), running=Engine.running is not None, temporary=sorted(temporary()),
                environment=dict(os.environ) == environment)


def two_steps(tp):
    "Train two steps, sample different prompts on each rank, close; and what was seen."
    seen = []
    def short(completions, completion_ids, prompts, **columns):
        seen.append((prompts, [list(map(int, c)) for c in completion_ids]))
        return [-float(len(c)) for c in completions]
    t = trainer(f"{out}/tp{tp}", reward=short, vllm_tensor_parallel_size=tp, per_device_train_batch_size=8, num_generations=8)
    t.train()
    t.vllm_generation.sync_weights()
    mine = [TOKENIZER(p)["input_ids"] for p in (["abcd>", "abcd>", "hgfe>"] if t.accelerator.process_index == 0 else ["bbbb>", "cccc>", "dddd>"])]
    prompts, completions, sampled, _ = t.vllm_generation.generate(mine, None, 1)
    gap = max((logprobs(t.model, p, c) - torch.tensor(l)[:, 0]).abs().max().item() for p, c, l in zip(mine, completions, sampled))
    same = [TOKENIZER("abcd>")["input_ids"]] * 2
    again = t.vllm_generation.generate(same, None, 2)[1]
    direct = t.engine.generate([same[0]], n=4, sampling=dict(max_tokens=8), seed=5)  # alike on all ranks of an engine
    result = dict(seen=seen, digest=[p.double().sum().item() for p in weights(t.model).values()], prompts=prompts == mine, gap=gap,
                  again=again, direct=[direct.completion(i).tolist() for i in range(4)], seed=t.engine.args["seed"], metrics=rows(t))
    t.close(say=False)
    return result | dict(left=left())


trainer_args = dict(config=ColocateGRPOConfig, per_device_train_batch_size=8, num_generations=8)
environment = dict(os.environ)
try: trainer(f"{out}/none", engine_args=dict(num_gpu_blocks_override=0), **trainer_args)
except EngineError as e: failed = str(e)
environment = dict(os.environ)  # with what accelerate has set
result = dict(rank=dist.get_rank(), size=dist.get_world_size(), failed=failed, after_failure=left(), tp=two_steps(2), dp=two_steps(1))
with open(f"{out}/rank{dist.get_rank()}.json", "w") as f: json.dump(result, f)
dist.destroy_process_group()
