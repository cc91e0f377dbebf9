"""`grpo-colab launch`: the 72B recipe is what its README says, and a real run on two processes."""
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_train import furnished
from two_ranks import NEEDS_DEEPSPEED

from grpo_colab.config import read_config
from grpo_colab.keeper import kin, processes
from grpo_colab.launch import GPUS, Machine, deepspeed_config, plan, shapes_of
from grpo_colab.memory import GIB
from grpo_colab.shards import estimate_table

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT/"examples/zero3_72b"


@pytest.mark.parametrize("gpus", [8, 16])
def test_the_recipe_is_what_its_readme_says(gpus):
    "Plan, table of each phase, main memory and DeepSpeed's configuration, from the file and the model's sizes."
    config = read_config(RECIPE/f"{gpus}gpus.yaml", ["--model_name_or_path", str(RECIPE)])
    machine = Machine(gpus, gpus // 8, int(GPUS["H200"] * GIB))
    s, text = shapes_of(config), (RECIPE/"README.md").read_text()
    found = plan(s, config.training, machine, "zero3-offload", prompt=1024)
    args = config.training
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps * gpus == 256
    assert (found.tp, found.level, str(found.shards)) == (gpus // 2, 2, f"zero3 over {gpus}, optimizer in main memory")
    assert f"{found}\n\n{estimate_table(found.estimate)}\n" in text
    assert f"{found.shards.main_memory(s, machine.nodes) / GIB:.0f} GiB of main memory a node" in text
    zero = deepspeed_config(found.shards)["zero_optimization"]
    assert zero["contiguous_gradients"] and zero["overlap_comm"] and zero["offload_optimizer"]["device"] == "cpu"


def test_the_recipe_trains_the_72b_model():
    "The file of sizes gives the parameters that the model has: 72.7 billion."
    s = shapes_of(read_config(RECIPE/"8gpus.yaml", ["--model_name_or_path", str(RECIPE)]))
    by_hand = 2 * 152064 * 8192 + 8192 + 80 * (2 * 8192*8192 + 8192 + 2 * (8192*1024 + 1024) + 3 * 8192*29568 + 2 * 8192)
    assert s.count == by_hand == 72_706_203_648


# ---- two processes

@pytest.fixture(scope="module")
def home(tmp_path_factory): return furnished(tmp_path_factory.mktemp("launch"))


def launch(home, *options):
    "Start it in a session of its own."
    outer = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
    env = outer | dict(PYTHONPATH=str(ROOT), GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    return subprocess.Popen([sys.executable, "-m", "grpo_colab.cli", "launch", "toy.yaml", "--nproc", "2", *options], cwd=home, env=env,
                            text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)


@pytest.mark.slow
def test_two_processes_train(home):
    p = launch(home, "--output_dir", "out", "--max_steps", "2")
    said, _ = p.communicate(timeout=300)
    assert p.returncode == 0, said[-4000:]
    assert "nothing is planned; ddp over 2" in said and "torch.distributed.run --nproc-per-node 2 --standalone" in said
    state = json.loads((home/"out/checkpoint-2/trainer_state.json").read_text())
    assert state["global_step"] == 2 and (home/"out/model.safetensors").exists()


@pytest.mark.slow
@NEEDS_DEEPSPEED
def test_two_processes_train_in_shards(home):
    "ZeRO-3, and one engine over both."
    p = launch(home, "--output_dir", "zero3", "--max_steps", "2", "--shard", "zero3", "--vllm_tensor_parallel_size", "2")
    said, _ = p.communicate(timeout=300)
    assert p.returncode == 0, said[-4000:]
    assert "zero3 over 2" in said and json.loads((home/"zero3/deepspeed.json").read_text())["zero_optimization"]["stage"] == 3
    assert (home/"zero3/model.safetensors").exists()


@pytest.mark.slow
def test_ctrl_c_ends_every_rank(home):
    "Ctrl-C once steps are made: within 30 s nothing runs any more."
    p = launch(home, "--output_dir", "long", "--max_steps", "10000", "--save_steps", "2", "--save_total_limit", "1")
    try:
        end = time.time() + 240
        while time.time() < end and not list((home/"long").glob("checkpoint-*")) and p.poll() is None: time.sleep(.2)
        assert p.poll() is None, p.communicate()[0][-4000:]
        family = kin(p.pid)
        assert len(family) >= 2
        start = time.time()
        p.send_signal(signal.SIGINT)
        said, _ = p.communicate(timeout=60)
        seconds = time.time() - start
    finally:
        if p.poll() is None: p.kill()
    assert p.returncode != 0 and seconds < 30, said[-4000:]
    left = family & set(processes())
    for q in left: os.kill(q, signal.SIGKILL)
    assert not left
