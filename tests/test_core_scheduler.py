"""The scheduler's shortcut of `core` in lockstep with vLLM's own scheduler, both kinds of it: on every step what the runner is
told and what is left in the scheduler must be equal. Everything is vLLM's own but the forward pass: tokens come from a hash.
"""
import copy
import enum
import hashlib
import random
from collections import Counter, deque
from concurrent.futures import Future
from dataclasses import fields
from itertools import product
from operator import attrgetter
from queue import Queue
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import Qwen2Config

from grpo_colab import compat, core

vllm = compat.import_vllm()
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK, WORDS, EOS, SEEDS = 16, 200, 7, range(12)  # tokens a block, the vocabulary, the end of a sequence
kinds = pytest.mark.parametrize("kind", [Scheduler, AsyncScheduler], ids=lambda k: k.__name__)


class Different(AssertionError): pass


def token(key, place): return int(hashlib.md5(f"{key} {place}".encode()).hexdigest()[:6], 16) % WORDS


class Later(Future):
    "A result that is only there when somebody waits for it: the core fills its queue of batches first."
    def __init__(self, value):
        super().__init__()
        self.set_result(value)

    def done(self): return False


class Runner:
    "Keeps of each request what vLLM's runner keeps, and gives the token of the hash where a forward pass would sample one."
    def __init__(self): self.kept, self.told = {}, None

    def execute_model(self, output, non_block=False):
        self.told, self.now = copy.deepcopy(output), output.num_scheduled_tokens
        for key in output.finished_req_ids: self.kept.pop(key, None)
        for n in output.scheduled_new_reqs:
            known = dict.fromkeys(["prompt", "size"], len(n.prompt_token_ids))
            self.kept[n.req_id] = SimpleNamespace(key=n.req_id, computed=n.num_computed_tokens, blocks=[*n.block_ids[0]], **known)
        old = output.scheduled_cached_reqs
        for i, key in enumerate(old.req_ids):
            r = self.kept[key]
            r.computed, r.size = old.num_computed_tokens[i], r.prompt + old.num_output_tokens[i]
            if key in old.resumed_req_ids: r.blocks = []
            if old.new_block_ids[i] is not None: r.blocks += old.new_block_ids[i][0]
        for r, n in ((self.kept[k], n) for k, n in self.now.items()):
            if r.computed + n > BLOCK*len(r.blocks): raise Different(f"{r.key} lacks a block")
        return Later(None if self.now else ModelRunnerOutput(req_ids=[], req_id_to_index={}))

    def sample_tokens(self, grammar, non_block=False):
        keys, rows = sorted(self.now), []  # not the scheduler's order: a runner has its own
        for r, n in ((self.kept[k], self.now[k]) for k in keys):
            rows.append([token(r.key, r.size - r.prompt)] if r.computed + n >= r.size else [])  # []: more of it is to be read
        first = np.array([row or [0] for row in rows], np.int32)
        result = ModelRunnerOutput(req_ids=keys, req_id_to_index={k: i for i, k in enumerate(keys)}, sampled_token_ids=rows,
                                   logprobs=LogprobsLists(first, first/-1000, np.zeros(len(keys), np.int32)))
        return Later(result) if non_block else result


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("model"))
    Qwen2Config(vocab_size=WORDS, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
                num_key_value_heads=1, max_position_embeddings=512, architectures=["Qwen2ForCausalLM"]).save_pretrained(path)
    init_none_hash(sha256)
    return EngineArgs(model=path, skip_tokenizer_init=True, dtype="float32", block_size=BLOCK, max_model_len=200,
                      enforce_eager=True, enable_prefix_caching=True).create_engine_config()


def llm_of(config, kind, blocks, seqs, longest, budget):
    "vLLM's core and scheduler without a model: what of a `vllm.LLM` the stepper uses."
    config, ahead, hasher = copy.deepcopy(config), kind is AsyncScheduler, get_request_block_hasher(BLOCK, sha256)
    vars(config.scheduler_config).update(async_scheduling=ahead, max_num_seqs=seqs, max_num_batched_tokens=budget,
                                         max_num_scheduled_tokens=None, enable_chunked_prefill=True)
    config.model_config.max_model_len, config.cache_config.num_gpu_blocks = longest, blocks
    groups = [KVCacheGroupSpec(["layer"], FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32))]
    scheduler = kind(vllm_config=config, kv_cache_config=KVCacheConfig(blocks, [], groups), block_size=BLOCK, log_stats=False,
                     structured_output_manager=StructuredOutputManager(config))
    engine = object.__new__(EngineCore)
    vars(engine).update(vllm_config=config, scheduler=scheduler, model_executor=Runner(), batch_queue=deque() if ahead else None,
                        batch_queue_size=2, async_scheduling=ahead, is_ec_consumer=True, is_pooling_model=False, log_stats=False,
                        use_spec_decode=False, check_for_draft_tokens=False, aborts_queue=Queue())
    engine.step_fn = engine.step_with_batch_queue if ahead else engine.step
    def enqueue(prompts, params, lora_request, use_tqdm):
        for g, j in product(range(len(prompts)), range(params.n)):
            one = copy.deepcopy(params)
            one.n = 1
            one.update_from_generation_config({}, EOS)
            scheduler.add_request(Request(f"{len(prompts)}-{g}-{j}", list(prompts[g]["prompt_token_ids"]), one, None,
                                          arrival_time=0., block_hasher=hasher))
    return SimpleNamespace(llm_engine=SimpleNamespace(engine_core=SimpleNamespace(engine_core=engine)), enqueue=enqueue)


def plain(x): return {k: v for k, v in vars(x).items() if isinstance(v, (int, str, list, set, deque, enum.Enum, type(None)))}
def ids(many): return type(many)(getattr(x, "request_id", x) for x in many)


def seen(stepper):
    "All that the runner was told, and all that is left in the scheduler: requests, queues, blocks, their hashes and references."
    s, told = stepper.scheduler, stepper.core.model_executor.told
    pool, [blocks] = s.kv_cache_manager.block_pool, s.kv_cache_manager.coordinator.single_type_managers
    return ({f.name: getattr(told, f.name) for f in fields(told)} | {"order": list(told.num_scheduled_tokens)}
            | {f"scheduler.{k}": ids(v) if isinstance(v, (list, set, deque)) else v for k, v in plain(s).items()}
            | {f"request {r.request_id}": plain(r) for r in s.requests.values() or stepper.requests}
            | {"blocks": {k: [b.block_id for b in v] for k, v in blocks.req_to_blocks.items() if v},
               "cached": dict(blocks.num_cached_block), "pool": [(b.block_hash, b.ref_cnt) for b in pool.blocks],
               "free": [b.block_id for b in pool.free_block_queue.get_all_free_blocks()]})


def together(whole, quick, where):
    ours, theirs = seen(quick), seen(whole)
    wrong = [f"{k}: {ours.get(k)}, vLLM: {theirs.get(k)}" for k in ours.keys() | theirs.keys() if ours.get(k) != theirs.get(k)]
    if wrong: raise Different("\n".join([where, *wrong]))


def right(r, longest):
    "The completion, token by token, and whether it stopped."
    done, p = [], r.sampling_params
    while len(done) < p.max_tokens and r.num_prompt_tokens + len(done) < longest:
        done.append(token(r.request_id, len(done)))
        if len(done) >= p.min_tokens and done[-1] in (EOS, *p.stop_token_ids): return done, True
    return done, False


def check(stepper, longest, count):
    "The arrays, by the hash. A request that was taken back has the beginning."
    tokens, logprobs, offsets, stopped = stepper.arrays()
    np.testing.assert_allclose(logprobs, tokens/-1000, rtol=1e-6)
    for i, r in enumerate(stepper.requests):
        found, (whole, stops), aborted = tokens[offsets[i]:offsets[i + 1]].tolist(), right(r, longest), "ABORTED" in r.status.name
        if aborted: whole, stops = whole[:len(found)], False
        if (found, bool(stopped[i])) != (whole, stops): raise Different(f"{r.request_id}: {found}, not {whole}")
        count.update(requests=1, tokens=len(found), stopped=stops, aborted=aborted, preempted=r.num_preemptions,
                     context_full=r.num_tokens == longest)
    assert not stepper.scheduler.requests and not stepper.core.batch_queue


def lockstep(config, kind, seed, monkeypatch):
    "One core with the shortcut, one without: a call that may be closed early, then one that runs out. Counts what occurred."
    rng, count, original = random.Random(seed), Counter(), core._going_on
    size = dict(blocks=rng.choice([14, 40, 120, 400]), seqs=rng.choice([4, 16, 40]), longest=rng.choice([96, 200]),
                budget=rng.choice([20, 48, 256, 4096]))
    params = vllm.SamplingParams(n=rng.choice([1, 3, 8]), max_tokens=rng.choice([2, 17, 80, 300]), min_tokens=rng.choice([0, 2]),
                                 stop_token_ids=rng.choice([[], [3, 5]]), logprobs=0)
    prompts = [rng.choices(range(WORDS), k=k) for k in rng.choices([1, 5, 15, 16, 17, 40, 70], k=rng.choice([2, 6, 12]))]
    llms = [llm_of(config, kind, **size) for _ in range(2)]
    def counted(scheduler):
        found = original(scheduler)
        count["short"] += found is not None
        return found
    with monkeypatch.context() as m:
        m.setattr(core, "_going_on", counted)
        for asked, limit in (prompts[1:], rng.randrange(1, 60)), (prompts, None):
            whole, quick = both = [core.Stepper(llm, params, shortcut) for llm, shortcut in zip(llms, (False, True))]
            assert quick.shortcut, core.shortcut_why(llms[1])
            with whole, quick:
                for s in both: s.add(asked)
                for i in range(limit or 10_000):
                    if not quick.left: break
                    s = whole.scheduler
                    held = s.waiting and len(s.running) < s.max_num_running_reqs  # by the pool: vLLM may admit, and must look
                    for s in both: s.step()
                    together(whole, quick, f"seed {seed}, step {i}")
                    told = whole.core.model_executor.told
                    moved = told.scheduled_new_reqs or told.scheduled_cached_reqs.resumed_req_ids or told.preempted_req_ids
                    count.update(steps=1, decodes=not (held or moved) and {*told.num_scheduled_tokens.values()} == {1},
                                 prefix_hits=sum(n.num_computed_tokens > 0 for n in told.scheduled_new_reqs))
                assert limit or not quick.left
                for s in both: s.close()
                together(whole, quick, f"seed {seed}, closed")
            check(quick, size["longest"], count)
    return count


@kinds
def test_shortcut_leaves_what_vllm_leaves(kind, config, monkeypatch):
    "Short are two of five steps: nearly all in which requests only decode. The rest admits, reads prompts, pre-empts, or may."
    count = sum((lockstep(config, kind, seed, monkeypatch) for seed in SEEDS), Counter())
    assert count["short"] > .95*count["decodes"] and count["short"] > .4*count["steps"], count
    for name in ("preempted", "stopped", "aborted", "context_full", "prefix_hits"): assert count[name] > 50, (name, count)


def going_on(**parts):
    "`_going_on`, for which these parts of the scheduler look otherwise."
    return lambda f: lambda s: f(SimpleNamespace(**vars(s) | parts))


ENDLESS = SimpleNamespace(block_pool=SimpleNamespace(get_num_free_blocks=lambda: 10**6))
FAULTS = dict(  # name -> the function, what is made of it
    one_falls_behind=("_advance", lambda f: lambda s, rs, done: f(s, rs, done | {*sorted({*range(len(rs))} - done)[:1]})),
    one_gets_no_block=("_going_on", lambda f: lambda s: (found := f(s)) and (found[0], found[1][:-1])),
    nobody_waits=("_going_on", going_on(waiting=(), skipped_waiting=())),
    pool_is_endless=("_going_on", going_on(kv_cache_manager=ENDLESS)),
    full_block_is_not_cached=("_full_block", lambda f: lambda *args: None),
    stop_is_unseen=("_append", lambda f: lambda s, sampled, keys, stops: f(s, sampled, keys, ())),
    token_is_lost=("Stepper._keep", lambda f: lambda self, keys, rows, logprobs: f(self, keys, rows[1:] or rows, logprobs)))


@kinds
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_seen(kind, fault, config, monkeypatch):
    "By the comparison; and by `core` itself, where vLLM had to pre-empt a request of a short step."
    name, planted = FAULTS[fault]
    monkeypatch.setattr(f"grpo_colab.core.{name}", planted(attrgetter(name)(core)))
    error, words = (RuntimeError, "pre-empted or left out") if fault == "pool_is_endless" else (Different, "")
    with pytest.raises(error, match=words):
        for seed in SEEDS: lockstep(config, kind, seed, monkeypatch)
