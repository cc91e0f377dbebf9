"""One rank of `test_ranks.py`: an engine that does not start, one engine over both ranks (TP), one on each (DP), weights in halves."""
import contextlib
import json
import os
import sys

from small import TASK, TOKENIZER, policy, rows, temporary, trainer, weights
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from grpo_colab import compat
from grpo_colab.colocate import ColocateGRPOConfig
from grpo_colab.engine import Engine, EngineError
from grpo_colab.policy import PackedGRPOTrainer
from grpo_colab.policy_weights import policy_weights
from grpo_colab.sample import check_alike
from grpo_colab.sharded import ShardedSync, fsdp2_gather, zero3_gather
from grpo_colab.weights import WeightSync
from trl import GRPOConfig, GRPOTrainer

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
    if tp > 1: result["refused"] = other_tokens(direct)
    t.close(say=False)
    return result | dict(left=left())


def other_tokens(rollouts):
    "What is said on each rank of an engine when one has sampled another token."
    check_alike(rollouts, compat.tp_cpu_group())
    rollouts.tokens[3] += dist.get_rank()
    try: check_alike(rollouts, compat.tp_cpu_group())
    except EngineError as e: return str(e)


def step(model, seed):
    "Move what trains, alike on every rank and in every kind of shards."
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in (p for p in model.parameters() if p.requires_grad):
            with whole_for_change(p): move(p, torch.randn(getattr(p, "ds_shape", p.shape)) * .05)


def whole_for_change(p):
    if not hasattr(p, "ds_id"): return contextlib.nullcontext()
    import deepspeed
    return deepspeed.zero.GatheredParameters([p], modifier_rank=0)


def move(p, by): p.add_(distribute_tensor(by, p.device_mesh, p.placements) if isinstance(p, DTensor) else by)


def memory(engine):
    "This rank's part of every parameter."
    return {n: p.detach().clone() for n, p in compat.engine_module(engine.llm).named_parameters()}


def beside_load_weights(engine, sync, model, whole):
    "Sync, step, sync by the plan; where the engine then differs from what vLLM's own loading brings, and how much."
    sync.sync(1)
    before = memory(engine)
    for m in {id(m): m for m in (model, whole)}.values(): step(m, seed=1)
    sync.sync(2)
    how = engine.trace.events[-1]["args"]
    ours = memory(engine)
    engine.load_weights(policy_weights(whole))
    theirs = memory(engine)
    fused = next(p for n, p in theirs.items() if "qkv_proj" in n and n.endswith("weight"))
    different = lambda a, b: [n for n in a if not torch.equal(a[n], b[n])]
    return dict(whole=how["whole"], planned=how["planned"], differ=different(ours, theirs), moved=different(before, ours),
                names=list(ours), worst=max((ours[n] - theirs[n]).abs().max().item() for n in ours),
                shape=list(fused.shape))


def by_rows(options):
    "TRL's trainer and ours under DDP, from one seed: how far their weights are apart and have moved, and the rows of each step here."
    ends, counts = [weights(policy())], []
    for cls in (GRPOTrainer, PackedGRPOTrainer):
        args = GRPOConfig(f"{out}/rows", per_device_train_batch_size=8, num_generations=4, max_completion_length=12, max_steps=2,
            gradient_accumulation_steps=2, optim="sgd", learning_rate=.1, use_cpu=True, bf16=False, save_strategy="no",
            report_to="none", disable_tqdm=True, **options)
        args.token_budget = 25
        t = cls(policy(), lambda completions, **columns: [c.count("a") - len(c) / 9 for c in completions], args, TASK.train,
                processing_class=TOKENIZER)
        if cls is PackedGRPOTrainer:
            cut = t._rows
            t._rows = lambda *given: counts.append(len(rows := cut(*given))) or rows
        t.train()
        ends.append(weights(t.model))
    far = lambda a, b: max((a[n] - b[n]).abs().max().item() for n in a)
    return dict(rows=counts, apart=far(ends[1], ends[2]), moved=far(ends[0], ends[1]), padded=t.padded_because())


def halved_engine(model, **changes):
    return Engine(model, TOKENIZER, tensor_parallel_size=2, load=False, max_model_len=32, max_num_seqs=8, enforce_eager=True,
                  dtype="float32", if_running="reuse", **changes)


def lora():
    "The model with a fresh adapter, alike on every rank."
    torch.manual_seed(0)
    return get_peft_model(policy(), LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear"))


def halves():
    "Each rank's half of an engine, from whole policies and from policies in shards."
    found = {}
    for arch in ("llama", "qwen2"):
        model = policy(arch=arch)
        engine = halved_engine(model)
        found[arch] = beside_load_weights(engine, WeightSync(engine, model), model, model)
    for name, shard, gather in sharded_kinds():
        for kind, make in (("", policy), ("_lora", lora)):
            model = shard(make())
            found[name + kind] = beside_load_weights(engine, ShardedSync(engine, model, gather, 20_000), model, make())
    model = lora()
    engine = halved_engine(model, enable_lora=True, max_lora_rank=8)
    found["fold"] = beside_load_weights(engine, WeightSync(engine, model), model, model)
    found["slot"] = in_a_slot(engine, model)
    engine.close(say=False)
    return found | dict(left=left())


def in_a_slot(engine, model):
    "How far greedy log-probs with the adapter in a slot are from those with it folded, and those from the base's."
    def greedy():
        prompts = [TOKENIZER(p)["input_ids"] for p in ("abcd>", "hgfe>")]
        return torch.tensor(engine.generate(prompts, sampling=dict(temperature=0, max_tokens=8)).logprobs)
    slot, fold = (WeightSync(engine, model, lora=kind) for kind in ("slot", "fold"))
    slot.sync(3)  # fills the slot, and the next goes by the copies
    step(model, seed=4)
    slot.sync(4)
    found = greedy()
    fold.sync(4)
    folded = greedy()
    engine.load_weights(policy_weights(policy()))
    gap = lambda other: (folded - other).abs().max().item()
    return dict(gap=gap(found), moved=gap(greedy()))


def sharded_kinds():
    "What puts a policy in shards over both ranks, and what gathers it."
    def fsdp2(model):
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        for block in base.get_decoder().layers: fully_shard(block)
        fully_shard(base)
        return model
    yield "fsdp2", fsdp2, fsdp2_gather
    if compat.installed("deepspeed") is None: return
    import deepspeed
    settings = dict(train_batch_size=2, zero_optimization=dict(stage=3, stage3_param_persistence_threshold=0))
    def zero3(model):
        with deepspeed.zero.Init(module=model, config_dict_or_path=settings): return model
    yield "zero3", zero3, zero3_gather


trainer_args = dict(config=ColocateGRPOConfig, per_device_train_batch_size=8, num_generations=8)
environment = dict(os.environ)
try: trainer(f"{out}/none", engine_args=dict(num_gpu_blocks_override=0), **trainer_args)
except EngineError as e: failed = str(e)
environment = dict(os.environ)  # with what accelerate has set
result = dict(rank=dist.get_rank(), size=dist.get_world_size(), failed=failed, after_failure=left(), tp=two_steps(2), dp=two_steps(1),
              halves=halves(), dapo=by_rows(dict(loss_type="dapo")),
              bnpo=by_rows(dict(loss_type="bnpo", mask_truncated_completions=True)))
with open(f"{out}/rank{dist.get_rank()}.json", "w") as f: json.dump(result, f)
dist.destroy_process_group()
