"""The examples that are programs: what they ask for, and a short real run."""
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
JOBS = ROOT/"examples/hf_jobs"


def asked(capsys, monkeypatch, *argv, code=0, **env):
    "What one prints that ends before it begins, in this process."
    monkeypatch.setattr(sys, "argv", list(map(str, argv)))
    monkeypatch.syspath_prepend(str(argv[0].parent))
    for name, value in env.items(): monkeypatch.setenv(name, value)
    try: runpy.run_path(str(argv[0]), run_name="__main__")
    except SystemExit as e: assert (e.code or 0) == code, e.code
    said = capsys.readouterr()
    return said.out + said.err * bool(code)


def program(*argv, **env):
    "Run one in a process of its own; what it printed."
    env = os.environ | dict(PYTHONPATH=str(ROOT)) | env
    done = subprocess.run([sys.executable, *map(str, argv)], env=env, text=True, stdin=subprocess.DEVNULL, capture_output=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def jobs():
    "What `start.py` would ask the Hub for: the trainer's Job, and those of its replicas."
    said = program(JOBS/"start.py", "--bucket", "me/grpo", "--replicas", "2", "--timeout", "30m", "--dry-run", "--", "--max_steps", "3",
                   HF_TOKEN="hf_secret")
    assert "hf_secret" not in said
    return json.loads(said)


def test_jobs_are_a_trainer_and_its_replicas(jobs):
    trainer, *replicas = jobs
    assert len(replicas) == 2 and trainer["command"][-2:] == ["--max_steps", "3"]
    assert [j["network_aliases"] for j in jobs] == [["trainer"], ["replica-0"], ["replica-1"]]
    assert {j["network_group"] for j in jobs} == {"grpo-1"} and not any("expose" in j for j in jobs)
    assert {j["timeout"] for j in jobs} == {"30m"}  # none goes on for ever
    labels = [j["labels"]["grpo-colab-fleet"] for j in jobs]
    assert labels == ["grpo-1", "grpo-1-replicas", "grpo-1-replicas"]  # which is what --stop looks for


def test_jobs_have_the_bucket_at_one_path(jobs):
    "Replicas read only; the trainer's checkpoints go there too."
    mounts = [{v["mountPath"]: v for v in j["volumes"]} for j in jobs]
    assert [m["/bucket"]["source"] for m in mounts] == ["me/grpo"] * 3
    assert [m["/bucket"].get("readOnly", False) for m in mounts] == [False, True, True]
    assert "/code" in mounts[0]


def test_replicas_are_ready_for_the_trainer(jobs):
    said = jobs[1]["command"]
    flag = dict(zip(said, said[1:]))
    assert (flag["--max-loras"], flag["--max-lora-rank"], flag["--logprobs-mode"]) == ("6", "16", "processed_logprobs")
    assert jobs[1]["env"]["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"


def test_a_trainer_elsewhere_has_exposed_replicas(capsys, monkeypatch):
    alone = json.loads(asked(capsys, monkeypatch, JOBS/"trainer.py", "--bucket", "me/grpo", "--replicas", "1", "--dry-run"))
    assert alone[0]["expose"] == [8000] and "network_group" not in alone[0]


def test_a_wrong_option_is_said_before_a_job_starts(capsys, monkeypatch):
    said = asked(capsys, monkeypatch, JOBS/"start.py", "--bucket", "me/grpo", "--dry-run", "--", "--max_stpes", "3", code=2)
    assert "--max_stpes" in said
    assert "--bucket OWNER/NAME, or --stop TAG" in asked(capsys, monkeypatch, JOBS/"start.py", code=2)


def test_h200_says_what_it_needs(capsys, monkeypatch):
    said = asked(capsys, monkeypatch, ROOT/"examples/async_lora_h200.py", "--help")
    for words in ("What it needs", "What it costs", "How to stop it", "--replicas"): assert words in said


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["server", "colocate"])
def test_h200_on_a_cpu(tmp_path, mode):
    "Two steps of a toy policy, in both ways."
    from grpo_colab import toys
    tokenizer = toys.toy_tokenizer()
    toys.save_toy(tmp_path/"toy", toys.toy_model(tokenizer), tokenizer)
    rows = [dict(question=f"{a}+{a}", answer=f"#### {2*a}") for a in range(32)]
    (tmp_path/"train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    vllm = dict(enforce_eager=True, num_gpu_blocks_override=400, block_size=16, max_num_seqs=64)
    said = program(ROOT/"examples/async_lora_h200.py", "--model", tmp_path/"toy", "--dataset", tmp_path/"train.jsonl", "--dataset_config",
                   "", "--out", tmp_path/"out", "--vllm_mode", mode, "--max_steps", "2", "--batch", "16", "--completion", "8", "--context",
                   "128", "--memory", ".2", "--engine_args", json.dumps(vllm), HF_HUB_OFFLINE="1", VLLM_CPU_KVCACHE_SPACE="1",
                   TORCH_COMPILE_DISABLE="1", OMP_NUM_THREADS="1")
    assert "report:" in said and {"report.html", "adapter_model.safetensors"} <= {p.name for p in (tmp_path/"out").iterdir()}
