"""TRL's snippet works unchanged: every kind of loss, reward, dataset, callback and adapter, two steps each on real vLLM."""
import copy
import math
import os
import re
import threading
from functools import partial

import pyarrow.parquet
import pytest
import torch
from datasets import Dataset
from peft import IA3Config, LoraConfig, VeraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from clock import without_clock
from small import TASK, TOKENIZER, changed, check_trained, policy, rows, short, trainer, weights
from grpo_colab import compat, toys
from grpo_colab.colocate import ColocateGRPOConfig, ColocateGRPOTrainer
from grpo_colab.engine import Engine


@pytest.fixture(scope="module", autouse=True)
def engine():
    "All tests share one vLLM, which each trainer takes over from the one before."
    yield
    if Engine.running: Engine.running.close(say=False)
    assert Engine.running is None


# ---- options of `GRPOConfig` ----

LOSSES = {k: dict(loss_type=k) for k in ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo")} | dict(
    luspo=dict(loss_type="luspo", importance_sampling_level="sequence"),
    gspo=dict(loss_type="grpo", importance_sampling_level="sequence"),
    vespo=dict(loss_type="vespo", vllm_importance_sampling_mode="token_truncate"))
OPTIONS = dict(
    scale_batch=dict(scale_rewards="batch"), scale_none=dict(scale_rewards=False), two_iterations=dict(num_iterations=2),
    accumulation=dict(per_device_train_batch_size=8, gradient_accumulation_steps=2),
    two_steps_a_generation=dict(per_device_train_batch_size=8, steps_per_generation=2),
    both=dict(per_device_train_batch_size=4, steps_per_generation=4, gradient_accumulation_steps=2),
    truncated_masked=dict(mask_truncated_completions=True), token_mask=dict(vllm_importance_sampling_mode="token_mask"),
    sequence_truncate=dict(vllm_importance_sampling_mode="sequence_truncate"), off_policy_mask=dict(off_policy_mask_threshold=.5),
    entropy=dict(top_entropy_quantile=.5, entropy_coef=.01), two_sided=dict(delta=1.5, epsilon_high=.28),
    no_checkpointing=dict(gradient_checkpointing=False), asleep=dict(vllm_enable_sleep_mode=True), padded=dict(pad_to_multiple_of=8))


@pytest.mark.parametrize("name", [*LOSSES, *OPTIONS])
def test_option(name, tmp_path):
    t = trainer(tmp_path, **(LOSSES | OPTIONS)[name])
    before = weights(t.model)
    t.train()
    check_trained(t, before)


def test_every_loss_is_here():
    "The losses that TRL's own help text lists."
    text = GRPOConfig.__dataclass_fields__["loss_type"].metadata["help"].split("Supported values are ")[1].split(". ")[0]
    assert set(re.findall(r"'(\w+)'", text)) == {c["loss_type"] for c in LOSSES.values()}


def test_sampling_options_reach_the_engine(tmp_path):
    "The engine's log-probs are those after temperature, top-k and the rest; TRL's correction sees them."
    t = trainer(tmp_path, temperature=.7, top_k=1)
    t.train()
    [first, *_] = [e for e in t.trace.events if e["name"] == "generate"]
    assert first["args"]["completions"] == 16
    assert rows(t)[0]["reward_std"] == 0  # top_k = 1: every completion of a prompt is the same


# ---- rewards ----

def letters(completions, **columns): return [float(sum(x in "abcdefgh" for x in c)) for c in completions]
async def later(completions, **columns): return letters(completions)


class Judge:
    "A reward with state, as a class."
    def __init__(self): self.seen = 0
    def __call__(self, completions, **columns):
        self.seen += len(completions)
        return torch.tensor(short(completions))  # a tensor is as good as a list


class LaterJudge(Judge):
    async def __call__(self, completions, **columns): return short(completions)


REWARDS = dict(asynchronous=later, a_class=Judge(), asynchronous_class=LaterJudge(), a_partial=partial(letters, extra=1),
               a_method=Judge().__call__)


@pytest.mark.parametrize("name", REWARDS)
def test_kind_of_reward(name, tmp_path):
    t = trainer(tmp_path, reward=REWARDS[name])
    before = weights(t.model)
    t.train()
    check_trained(t, before)


def test_weighted_rewards(tmp_path):
    "One number by hand: the reward is the weighted sum of what the functions gave on average."
    t = trainer(tmp_path, reward=[short, later], reward_weights=[1., .5])
    t.train()
    for r in rows(t): assert math.isclose(r["reward"], r["rewards/short/mean"] + .5 * r["rewards/later/mean"], rel_tol=1e-5)
    t = trainer(tmp_path, reward=[short, letters], multi_objective_aggregation="normalize_then_sum")
    t.train()
    assert len(rows(t)) == 2


def test_rewards_that_judge_some(tmp_path):
    "Each function returns None where it does not apply; together they judge every row."
    def odd(completions, prompts, **columns):
        return [None if p < "d" else float(len(c)) for p, c in zip(prompts, completions)]
    def even(completions, prompts, **columns):
        return [-float(len(c)) if p < "d" else None for p, c in zip(prompts, completions)]
    t = trainer(tmp_path, reward=[odd, even])
    before = weights(t.model)
    t.train()
    check_trained(t, before)


def test_what_a_reward_is_told(tmp_path):
    "All of TRL's arguments: columns, token ids, the trainer's state, and the two ways to log."
    seen = []
    def told(prompts, completions, completion_ids, answer, trainer_state, log_extra, log_metric, **rest):
        assert [a[::-1] + ">" for a in answer] == prompts and not rest
        assert TOKENIZER.batch_decode(completion_ids, skip_special_tokens=True) == completions
        seen.append(trainer_state.global_step)
        log_extra("answer", answer)
        log_metric("size", len(completions))
        return short(completions)
    t = trainer(tmp_path, reward=told, log_completions=True)
    t.train()
    assert seen == [0, 1] and [r["size"] for r in rows(t)] == [16, 16]
    table = pyarrow.parquet.read_table(tmp_path/"completions/completions_00002.parquet").to_pydict()
    assert len(table["completion"]) == 16 and table["answer"] == [p[:-1][::-1] for p in table["prompt"]]


def test_reward_model(tmp_path):
    config = copy.deepcopy(policy().config)
    config.num_labels, config.pad_token_id = 1, TOKENIZER.pad_token_id
    judge = AutoModelForSequenceClassification.from_config(config)
    t = trainer(tmp_path, reward=judge, parts=dict(reward_processing_classes=TOKENIZER))
    before = weights(t.model)
    t.train()
    check_trained(t, before)


# ---- data, evaluation, generation ----

def chat(n): return Dataset.from_dict({"prompt": [[dict(role="user", content=p)] for p in TASK.train["prompt"][:n]]})


def test_conversations(tmp_path):
    def judge(completions, **columns):
        assert all(len(c) == 1 and c[0]["role"] == "assistant" for c in completions)
        return [-float(len(c[0]["content"])) for c in completions]
    t = trainer(tmp_path, reward=judge, data=chat(16))
    before = weights(t.model)
    t.train()
    check_trained(t, before)


def test_iterable_dataset(tmp_path):
    t = trainer(tmp_path, data=TASK.train.to_iterable_dataset())
    before = weights(t.model)
    t.train()
    check_trained(t, before)


def test_evaluation(tmp_path):
    "While training and by hand; one set or several; another number of completions a prompt."
    t = trainer(tmp_path, parts=dict(eval_dataset=TASK.test), eval_strategy="steps", eval_steps=1, num_generations_eval=2)
    before = weights(t.model)
    t.train()
    spans = [e["args"] for e in t.trace.events if e["name"] == "generate"]
    assert [(s["prompts"], s["completions"]) for s in spans] == [(4, 16), (8, 16), (8, 16)] * 2  # 16 held-out prompts, twice
    held_out = [l for l in t.state.log_history if "eval_reward" in l]
    assert [l["step"] for l in held_out] == [1, 2]
    check_trained(t, before)
    assert math.isfinite(t.evaluate()["eval_reward"])
    t = trainer(tmp_path, parts=dict(eval_dataset=dict(a=TASK.test, b=TASK.train.select(range(4)))))
    assert {"eval_a_loss", "eval_b_loss", "eval_reward"} <= t.evaluate().keys()  # before any training, named as TRL names them


def test_generation_options(tmp_path):
    "Stop strings, and output bound to a pattern in both of TRL's ways."
    seen = []
    def judge(completions, **columns): seen.extend(completions); return short(completions)
    t = trainer(tmp_path, reward=judge, generation_kwargs=dict(stop=["a", "b"]))
    t.train()
    ended = [c for c in seen if "a" in c or "b" in c]
    assert ended and all(re.fullmatch(r"[^ab]*[ab]", c) for c in ended)
    for options in (dict(vllm_structured_outputs_regex="[xy]{5}"), dict(generation_kwargs=dict(structured_outputs=dict(regex="[xy]{5}")))):
        seen.clear()
        trainer(tmp_path, reward=judge, **options).train()
        assert len(seen) == 32 and all(re.fullmatch("[xy]{5}", c) for c in seen)


def test_our_options(tmp_path):
    "What TRL has no field for: any engine argument, also one that we set ourselves."
    t = trainer(tmp_path, config=ColocateGRPOConfig, engine_args=dict(seed=5, dtype="float32", max_num_seqs=4))
    assert t.engine.llm.llm_engine.vllm_config.scheduler_config.max_num_seqs == 4
    assert t.engine.args["seed"] == 5
    from_command_line = ColocateGRPOConfig(str(tmp_path), engine_args='{"max_num_seqs": 4}', bf16=False)
    assert from_command_line.engine_args == dict(max_num_seqs=4)


def test_in_a_thread(tmp_path):
    "Where there are no signals: a notebook that watches its run."
    t = trainer(tmp_path)
    before = weights(t.model)
    thread = threading.Thread(target=t.train)
    thread.start()
    thread.join()
    check_trained(t, before)


def test_optimizer_and_callback(tmp_path):
    "A user's optimizer, and a callback that ends the run."
    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs): control.should_training_stop = state.global_step == 3
    model = policy()
    sgd = torch.optim.SGD(model.parameters(), lr=.1)
    t = trainer(tmp_path, model, parts=dict(callbacks=[Stop()], optimizers=(sgd, None)), max_steps=9)
    before = weights(t.model)
    t.train()
    check_trained(t, before, steps=3)


# ---- the model ----

@pytest.fixture(scope="module")
def saved(tmp_path_factory): return str(toys.save_toy(tmp_path_factory.mktemp("model"), policy(), TOKENIZER))


def test_path_and_object_are_the_same_run(saved, tmp_path):
    ends = []
    for model, tokenizer in ((policy(), TOKENIZER), (saved, None)):  # of a path, TRL loads the tokenizer too
        t = trainer(tmp_path, model, parts=dict(processing_class=tokenizer))
        t.train()
        ends.append(weights(t.model))
    assert not changed(*ends)


def test_reference_model(saved, tmp_path):
    t = trainer(tmp_path, saved, beta=.1, max_steps=3)
    before = weights(t.model)
    t.train()
    check_trained(t, before, steps=3)
    assert rows(t)[0]["kl"] == 0 and rows(t)[2]["kl"] > 0
    assert not changed(before, weights(t.ref_model))
    t = trainer(tmp_path, saved, beta=.1, sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=1.)
    t.train()
    assert not changed(weights(t.model), weights(t.ref_model))


def lora(**changes):
    return LoraConfig(**dict(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM") | changes)


ADAPTERS = dict(
    lora=lora(), every_linear=lora(target_modules="all-linear"), rslora=lora(use_rslora=True), dora=lora(use_dora=True),
    pissa=lora(init_lora_weights="pissa"), bias=lora(bias="all"), ranks=lora(rank_pattern={"q_proj": 8}),
    saved_norm=lora(modules_to_save=["norm"]), saved_mlp=lora(target_modules=["q_proj"], modules_to_save=["mlp"]),
    saved_head=lora(modules_to_save=["lm_head"]), saved_embedding=lora(modules_to_save=["embed_tokens"]),
    tied=lora(modules_to_save=["embed_tokens"], ensure_weight_tying=True), embedding=lora(target_modules=["q_proj", "embed_tokens"]),
    tokens=lora(trainable_token_indices=[6, 7]), dora_with_saved=lora(use_dora=True, modules_to_save=["norm"]),
    ia3=IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    vera=VeraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapter(name, tmp_path):
    "The engine samples as the adapted policy does, and the base does not change by a bit. The toy's embeddings are tied."
    tied = name != "tokens"  # which TRL cannot train on a tied head
    t = trainer(tmp_path, policy(tie_word_embeddings=tied), parts=dict(peft_config=ADAPTERS[name]))
    before = weights(t.model)
    t.train()
    check_trained(t, before)
    trained = {n for n, p in t.model.named_parameters() if p.requires_grad}
    assert set(changed(before, weights(t.model))) <= trained


@pytest.mark.parametrize("name", ["lora", "dora_with_saved"])
def test_adapter_with_reference(name, tmp_path):
    "beta > 0: the reference is the policy with its adapter off, or, for an adapter that came trained, a copy of it."
    t = trainer(tmp_path, parts=dict(peft_config=ADAPTERS[name]), beta=.1, max_steps=3)
    before = weights(t.model)
    t.train()
    check_trained(t, before, steps=3)
    assert rows(t)[0]["kl"] == 0 and rows(t)[2]["kl"] > 0
    model = get_peft_model(policy(), ADAPTERS[name])
    with torch.no_grad():
        for n, p in model.named_parameters():
            if "lora_B" in n: p.normal_(std=.1)
    t = trainer(tmp_path, model, beta=.1, max_steps=3)
    before = weights(t.model)
    assert "ref" in t.model.peft_config
    t.train()
    check_trained(t, before, steps=3)
    assert rows(t)[0]["kl"] == 0 and rows(t)[2]["kl"] > 0
    assert not any(".ref." in n for n in changed(before, weights(t.model)))


# ---- checkpoints ----

@pytest.mark.parametrize("name", ["full", "lora", "dora_with_saved", "accumulation"])
def test_resume_from_a_checkpoint(name, tmp_path):
    "A run that is resumed in its second epoch ends with the weights, to the bit, of one that was not stopped."
    options = dict(max_steps=6, save_strategy="steps", save_steps=1) | (OPTIONS["accumulation"] if name == "accumulation" else {})
    def run(out):
        return trainer(out, data=TASK.train.select(range(16)), parts=dict(peft_config=copy.deepcopy(ADAPTERS.get(name))), **options)
    whole = run(tmp_path/"whole")
    whole.train()
    for step in (4, 5):  # the first is the end of an epoch of four steps
        t = run(tmp_path/f"resumed-{step}")
        t.train(resume_from_checkpoint=str(tmp_path/f"whole/checkpoint-{step}"))
        assert [r["step"] for r in rows(t)] == [1, 2, 3, 4, 5, 6]
        assert not changed(weights(whole.model), weights(t.model)), f"resumed at {step}"
        assert [r["reward"] for r in rows(t)] == [r["reward"] for r in rows(whole)]


def test_resume_inside_a_generation(tmp_path):
    """One generation serves two steps; a checkpoint between them has no rollouts. The resumed run samples its prompts again
    for the second, and from then on is at the same prompts as a run that was not stopped."""
    seen = []
    def judge(prompts, trainer_state, completions, **columns):
        seen.append((trainer_state.global_step, tuple(prompts)))
        return short(completions)
    options = dict(max_steps=6, save_strategy="steps", save_steps=1, **OPTIONS["two_steps_a_generation"])
    trainer(tmp_path, reward=judge, **options).train()
    whole, seen[:] = dict(seen), []
    assert [*whole] == [0, 2, 4]
    trainer(tmp_path/"resumed", reward=judge, **options).train(resume_from_checkpoint=str(tmp_path/"checkpoint-3"))
    assert seen == [(3, whole[2]), (4, whole[4])]


@pytest.mark.parametrize("asked, on", [("auto", False), (True, True), (False, False)])
def test_checkpointing_is_chosen(asked, on, tmp_path):
    "A toy fits without it, so 'auto' leaves it out; under both names that Transformers has for it."
    t = trainer(tmp_path, config=ColocateGRPOConfig, gradient_checkpointing=asked, max_steps=1)
    t.train()
    assert t.model.is_gradient_checkpointing == on == t.args.gradient_checkpointing
    assert getattr(t.args, "activation_checkpointing", on) == on


# ---- the same as TRL ----

class Events(TrainerCallback):
    "Keeps every event, and the gradients that the optimizer gets."
    def __init__(self): self.seen, self.grads = [], []
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.seen.append(("on_pre_optimizer_step", state.global_step))
        self.grads.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})


for _name in [n for n in dir(TrainerCallback) if n.startswith("on_") and n != "on_pre_optimizer_step"]:
    def _keep(self, args, state, control, _name=_name, **kwargs): self.seen.append((_name, state.global_step))
    setattr(Events, _name, _keep)


class NoEngine:
    "Stands in TRL's trainer where its engine would be: the rollouts are recorded ones."
    def __init__(self, **kwargs): pass
    def sync_weights(self): pass


def recorded(out, **options):
    "What our trainer's engine sampled, call by call, in a run with these options."
    t, calls = trainer(out, **options), []
    generate = t.vllm_generation.generate
    def keep(*args, **kwargs): calls.append(generate(*args, **kwargs)); return calls[-1]
    t.vllm_generation.generate = keep
    t.train()
    return [dict(prompt_ids=p, completion_ids=c, logprobs=[[x[0] for x in l] for l in lps]) for p, c, lps, _ in calls]


def replayed(out, cls, calls, model, **options):
    "A run of either trainer in which TRL's `rollout_func` returns what was recorded."
    events, left = Events(), list(calls)
    t = trainer(out, model, cls=cls, parts=dict(callbacks=[events], rollout_func=lambda prompts, trainer: left.pop(0),
                                                eval_dataset=TASK.test.select(range(4))), **options)
    t.train()
    assert not left
    return t, events


PARITY = LOSSES | {k: OPTIONS[k] for k in ("scale_batch", "two_iterations", "both", "accumulation", "entropy", "off_policy_mask")} | dict(
    reference=dict(beta=.1), two_epochs=dict(num_train_epochs=2, max_steps=-1))


def both_ways(name, saved, tmp_path, **ours):
    "One run of TRL's trainer and one of ours on the same rollouts: trainers, events, logs without times."
    options = PARITY[name] | (dict(save_strategy="steps", save_steps=2) if name == "both" else {})
    data = dict(data=TASK.train.select(range(12)))
    if ours: options = dict(gradient_checkpointing=True) | options
    else: options |= dict(optim="sgd")  # AdamW makes steps of what is only rounding
    calls = recorded(tmp_path/"recorded", model=saved, **data, **options)
    with compat.trl_engine(NoEngine): theirs = replayed(tmp_path/"theirs", GRPOTrainer, calls, saved, **data, **options)
    mine = replayed(tmp_path/"ours", ColocateGRPOTrainer, calls, saved, **data, **options, **ours)
    logs = [[without_clock(row) for row in t.state.log_history] for t, _ in (theirs, mine)]
    assert theirs[1].seen == mine[1].seen
    assert len(theirs[1].grads) == len(mine[1].grads) == mine[0].state.global_step
    return theirs, mine, logs


@pytest.mark.parametrize("name", PARITY)
def test_same_rollouts_same_everything(name, saved, tmp_path):
    "Padded: loss, every metric, every gradient, weights and the order of all events are those of TRL's trainer, to the bit."
    theirs, ours, logs = both_ways(name, saved, tmp_path, config=ColocateGRPOConfig, packing=False)
    assert logs[0] == logs[1]
    for a, b in zip(theirs[1].grads, ours[1].grads): assert a.keys() == b.keys() and not changed(a, b)
    assert not changed(weights(theirs[0].model), weights(ours[0].model))


@pytest.mark.parametrize("name", PARITY)
def test_rows_train_alike(name, saved, tmp_path):
    "Packed, as is the default: the same but for the order of sums."
    theirs, ours, logs = both_ways(name, saved, tmp_path)
    assert not ours[0].padded_because()
    for a, b in zip(*logs, strict=True): assert a == pytest.approx(b, rel=1e-4, abs=1e-5)
    close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-6)
    for a, b in zip(theirs[1].grads, ours[1].grads): close(a, b)
    close(weights(theirs[0].model), weights(ours[0].model))


def test_learns_as_trl_does(saved, tmp_path):
    """TRL's trainer with its own vLLM beside ours, 40 steps from the same policy on one task. The samples differ, so the
    curves do too: the last ten steps must agree to within 0.4 characters, where the first and the last ten are 3 apart."""
    if Engine.running: Engine.running.close(say=False)
    curves, options = {}, dict(max_steps=40, learning_rate=2e-3, lr_scheduler_type="constant")
    compat.keep_cpu_weights_loadable()  # without it, TRL cannot send weights to a vLLM on a CPU
    before = dict(os.environ)
    t = trainer(tmp_path, saved, cls=GRPOTrainer, **options)
    try: t.train()
    finally:
        compat.shut_down(t.vllm_generation.llm)  # TRL itself never does
        os.environ.clear(); os.environ.update(before)
    curves["trl"] = [r["reward"] for r in rows(t)]
    del t
    t = trainer(tmp_path, saved, **options)
    t.train()
    curves["ours"] = [r["reward"] for r in rows(t)]
    first, last = ({k: sum(c[s])/10 for k, c in curves.items()} for s in (slice(0, 10), slice(-10, None)))
    print({k: [round(x, 2) for x in c] for k, c in curves.items()}, first, last)
    assert abs(last["ours"] - last["trl"]) < .4
    assert all(last[k] > first[k] + 2 for k in curves)
