"""Two processes under torchrun, over gloo on the CPU: one engine over both (TP), then one on each (DP)."""
import pytest
from two_ranks import run_ranks

from grpo_colab.compat import installed

LEFT = dict(sum=3, vllm=False, running=False, temporary=[], environment=True)  # accelerate's group adds 1 and 2; nothing else


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    "Run `rank_run.py` on two ranks; what each found. Both must leave no directory."
    out = tmp_path_factory.mktemp("ranks")
    (out/"tmp").mkdir()
    found = run_ranks("rank_run.py", out, TMPDIR=str(out/"tmp"))
    assert not [f.name for f in (out/"tmp").iterdir() if f.name.startswith("grpo_colab-")]
    return found


def test_an_engine_that_does_not_start(ranks):
    "The error says why on each rank, and accelerate's process group is still there."
    for r in ranks: assert "No available memory for the cache" in r["failed"] and r["after_failure"] == LEFT


@pytest.mark.parametrize("kind", ["tp", "dp"])
def test_two_steps(ranks, kind):
    "What holds however the engines are spread: own completions, the policy's log-probs, one policy, everything closed."
    assert [(r["rank"], r["size"]) for r in ranks] == [(0, 2), (1, 2)]
    a, b = found = [r[kind] for r in ranks]
    for r in found:
        assert r["prompts"] and r["gap"] < 1e-4  # its own prompts, in its order; sampled as its policy would
        assert [len(c) for _, c in r["seen"]] == [8, 8]  # two steps of eight completions …
        assert all(len(set(p)) == 1 for p, _ in r["seen"])  # … of one prompt
        assert [m["step"] for m in r["metrics"]] == [1, 2]
        assert all(abs(m["sampling/importance_sampling_ratio/mean"] - 1) < .02 for m in r["metrics"])
        assert r["left"] == LEFT
    assert a["digest"] == b["digest"]
    assert [m["reward"] for m in a["metrics"]] == [m["reward"] for m in b["metrics"]]  # of all sixteen
    assert a["seen"] != b["seen"] and a["again"] != b["again"]


def test_one_engine_over_two_ranks(ranks):
    "Both ranks sample alike; a prompt that both ask for twice has four different completions, two for each."
    a, b = (r["tp"] for r in ranks)
    assert a["seed"] == b["seed"] and a["direct"] == b["direct"]
    for r in (a, b): assert "have sampled different tokens (1 from 0): start all with the same seed" in r["refused"]
    assert len({tuple(c) for c in a["again"] + b["again"]}) == 4


def test_an_engine_on_each_rank(ranks):
    "Their seeds differ, and so do their completions of the same prompt."
    a, b = (r["dp"] for r in ranks)
    assert a["seed"] + 1 == b["seed"]
    assert len({tuple(c) for c in a["again"] + b["again"]}) == 4


ZERO3 = ["zero3"] if installed("deepspeed") else []


@pytest.mark.parametrize("kind", ["qwen2", "llama", "fsdp2", *ZERO3])
def test_each_half_is_what_load_weights_brings(ranks, kind):
    "By the plan, bit by bit, on each rank; from a whole policy, and from one in shards over both."
    for r in ranks:
        r = r["halves"][kind]
        assert (r["differ"], r["whole"], r["planned"], r["moved"]) == ([], False, True, r["names"])
        assert r["shape"] == [32 + 32 + 32, 64]  # one of two heads' queries; the keys and values of the only head are on both
    assert all(r["halves"]["left"] == LEFT for r in ranks)


@pytest.mark.parametrize("kind", ["fold", "fsdp2_lora", *(f"{kind}_lora" for kind in ZERO3)])
def test_each_half_with_an_adapter(ranks, kind):
    "Folded by the plan beside PEFT's merge, as vLLM loads it."
    for r in ranks:
        r = r["halves"][kind]
        assert r["worst"] < 1e-6 and r["planned"] and not r["whole"]
        assert all("_proj" in n for n in r["moved"]) and len(r["moved"]) == 4  # fused to four weights a layer, and the base stays


def test_adapter_in_a_slot_of_two_ranks(ranks):
    "Log-probs as when it is folded, and not those of the base."
    for r in ranks: assert r["halves"]["slot"]["gap"] < 1e-3 < r["halves"]["slot"]["moved"]


@pytest.mark.parametrize("loss", ["dapo", "bnpo"])
def test_rows_of_two_ranks(ranks, loss):
    "Completions differ in length, so the ranks have different numbers of rows; the policy is TRL's all the same."
    a, b = found = [r[loss] for r in ranks]
    assert a["rows"] != b["rows"] and max(a["rows"] + b["rows"]) > 2
    for r in found: assert r["padded"] == "" and r["apart"] < 1e-6 < 1e-3 < r["moved"]
