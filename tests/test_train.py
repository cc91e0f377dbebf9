"""`grpo-colab train`: resumed runs, faults, Ctrl-C, and a real model on real questions, in processes of their own."""
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from clock import without_clock
from grpo_colab.cli import main

ROOT = Path(__file__).resolve().parent.parent
TOY = """
model_name_or_path: toy
dataset_name: problems.jsonl
conversational: false
reward_funcs: my_rewards.vowels
per_device_train_batch_size: 8
num_generations: 4
max_completion_length: 8
max_steps: 4
save_steps: 2
logging_steps: 1
learning_rate: 1e-3
report_to: none
disable_tqdm: true
engine_args: {enforce_eager: true}
"""
REWARD = """
def vowels(completions, **columns):
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [sum(map(t.count, "aeiou"))/max(len(t), 1) for t in texts]
"""
RUNS = "import json, sys; from grpo_colab.cli import main; sys.exit(max(main(a) for a in json.loads(sys.argv[1])))"


def furnished(home):
    "A directory with a toy checkpoint, problems, a reward and a config: the working directory of runs."
    from grpo_colab.toys import save_toy, toy_model, toy_tokenizer
    tokenizer = toy_tokenizer()
    save_toy(str(home/"toy"), toy_model(tokenizer), tokenizer)
    rows = [dict(prompt=f"{a} + {b} =") for a in range(4) for b in range(4)]
    (home/"problems.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (home/"my_rewards.py").write_text(REWARD)
    (home/"toy.yaml").write_text(TOY)
    return home


@pytest.fixture(scope="module")
def home(tmp_path_factory): return furnished(tmp_path_factory.mktemp("train"))


def child(home, *command, **env):
    "Run a command in `home`; its output is shown when it fails."
    env = os.environ | dict(PYTHONPATH=str(ROOT)) | env
    done = subprocess.run([sys.executable, *command], cwd=home, env=env, text=True, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def logs(checkpoint):
    "Step -> what was logged there, without what a clock says."
    history = json.loads((checkpoint/"trainer_state.json").read_text())["log_history"]
    return {row["step"]: without_clock(row) for row in history}


# a dataset of 16 problems is 8 steps long, of 4 problems 2 steps, of 6 problems 3 steps
CASES = {
    "inside the first epoch": [],
    "into the second epoch": ["--dataset_train_split", "train[:4]"],
    "lora over the end of an epoch": ["--dataset_train_split", "train[:6]", "--use_peft", "--lora_dropout", "0.1"],
}


@pytest.fixture(scope="module")
def resumed(home):
    "Runs of four steps, and in another process the same ones resumed from their second step."
    whole = [["train", "toy.yaml", *more, "--output_dir", name] for name, more in CASES.items()]
    again = [[*run[:-1], f"{name}, resumed", "--resume_from_checkpoint", f"{name}/checkpoint-2"]
             for run, name in zip(whole, CASES)]
    for runs in (whole, again): child(home, "-c", RUNS, json.dumps(runs))
    return home


@pytest.mark.parametrize("name", CASES)
def test_resumes_to_the_same_next_step(resumed, name):
    whole, again = resumed/name, resumed/f"{name}, resumed"
    first, second = logs(whole/"checkpoint-4"), logs(again/"checkpoint-4")
    for log in first, second: print([[log[step][k] for k in ("loss", "reward", "grad_norm")] for step in (3, 4)])
    assert not (again/"checkpoint-2").exists()
    assert first[3] == second[3] and first[4] == second[4]
    assert first[3]["reward"] != first[4]["reward"] and first[3]["grad_norm"] > 0  # or there would be nothing to see
    file = "adapter_model.safetensors" if "lora" in name else "model.safetensors"
    end = (whole/file).read_bytes()
    assert end == (whole/"checkpoint-4"/file).read_bytes() == (again/file).read_bytes()
    assert end != (whole/"checkpoint-2"/file).read_bytes()


def test_second_epoch_is_another_order(resumed):
    "What the cases above rely on: the epochs are as they say."
    epochs = {name: [log["epoch"] for log in map(logs(resumed/name/"checkpoint-4").get, (2, 3, 4))] for name in CASES}
    assert epochs == dict(zip(CASES, ([.25, .375, .5], [1, 1.5, 2], [2/3, 1, 4/3])))


FAULTS = {  # changed lines of the config, or options -> what is said
    "no such file": (None, [], "no config file missing.yaml"),
    "no such field": ("learning_rat: 1", [], "faulty.yaml line 2: unknown field learning_rat, did you mean learning"),
    "no such option": ("", ["--learning_rat", "1"], "--learning_rat: unknown field learning_rat"),
    "wrong type": ("warmup_steps: some", [], "warmup_steps is 'some', expected a number"),
    "no such engine argument": ("", ["--engine_args.enforce_eagr", "true"], "did you mean enforce_eager"),
    "does not divide": ("", ["--num_generations", "3"], "divisible"),
    "no such dataset": ("", ["--dataset_name", "questions.jsonl"], "'questions.jsonl', split 'train': no such file"),
    "empty dataset": ("", ["--dataset_name", "empty.jsonl"], "'empty.jsonl', split 'train': it is empty"),
    "no such column": ("prompt_column: question", [], "no column 'question', only prompt"),
    "no such module": ("", ["--reward_funcs", "your_rewards.vowels"], "no module 'your_rewards' is installed"),
    "no such reward": ("", ["--reward_funcs", "my_rewards.vowel"], "did you mean vowels?"),
    "no function": ("", ["--reward_funcs", "my_rewards.limit"], "a int, expected a function"),
    "no such checkpoint": ("", ["--model_name_or_path", "./models/none"], "no checkpoint at ./models/none"),
    "nothing to resume": ("", ["--resume_from_checkpoint", "runs/none"], "no checkpoint to resume from at runs/none"),
    "nothing newest to resume": ("", ["--resume_from_checkpoint", "true"], "no whole checkpoint in runs/faulty"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults(home, name, monkeypatch, capsys):
    line, options, words = FAULTS[name]
    monkeypatch.chdir(home)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("empty.jsonl").write_text("")
    Path("my_rewards.py").write_text(REWARD + "limit = 3\n")
    if line is not None: Path("faulty.yaml").write_text(TOY.replace("\n", f"\n{line}\n", 1))
    code, said = main(["train", "missing.yaml" if line is None else "faulty.yaml", *options]), capsys.readouterr().err
    assert code == 2 and words in said and "grpo-colab: " in said and "Traceback" not in said, said


def test_interrupt(home):
    "Ctrl-C while it trains: one line, exit code 130, where to go on, and a report of the steps so far."
    command = "-m grpo_colab.cli train toy.yaml --max_steps 5000 --save_total_limit 1 --output_dir stopped".split()
    run = subprocess.Popen([sys.executable, *command], cwd=home, env=os.environ | dict(PYTHONPATH=str(ROOT)), text=True,
                           stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    trace, end = home/"stopped/trace.jsonl", time.time() + 120
    def begun(): return trace.exists() and trace.read_text().count('"name":"checkpoint"') > 1
    while run.poll() is None and time.time() < end and not begun(): time.sleep(.2)
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=60)
    assert run.returncode == 130 and err.endswith("\ngrpo-colab: interrupted\n") and "Traceback" not in err, err[-3000:]
    assert "go on from the newest with --resume_from_checkpoint true" in out
    assert "report       stopped/report.html" in out and (home/"stopped/report.html").exists()


def questions(home):
    "The real GSM8K where it is at hand, else problems written as it writes them."
    data = Path(os.environ.get("GRPO_COLAB_GSM8K", ROOT.parent/"shared/data/gsm8k/train.jsonl"))
    if data.exists(): return data
    worked = "{n}+{n} = <<{n}+{n}={two}>>{two} apples.\n#### {two}"
    rows = [dict(question=f"Ann has {n} apples and buys {n} more. How many has she?",
                 answer=worked.format(n=n, two=2*n)) for n in range(2, 40)]
    (home/"gsm8k.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return home/"gsm8k.jsonl"


def test_smollm2_on_gsm8k(tmp_path):
    """The example, on a real model and real questions: two steps of four short answers. A second reward sees to it that
    there is something to learn, however few of the answers are right."""
    from grpo_colab.smollm2 import smollm2_checkpoint
    smollm2_checkpoint(tmp_path/"smollm2")
    (tmp_path/"my_rewards.py").write_text(REWARD)
    said = child(tmp_path, "-m", "grpo_colab.cli", "train", ROOT/"examples/smollm2_gsm8k.yaml", "--output_dir", "out",
                 "--model_name_or_path", "smollm2", "--dataset_name", questions(tmp_path), "--save_only_model",
                 "--reward_funcs", "grpo_colab.rewards.math_reward", "my_rewards.vowels", "--max_steps", "2",
                 "--per_device_train_batch_size", "4", "--max_completion_length", "16",
                 OMP_NUM_THREADS="1")  # more would wait for each other whenever something else runs
    out, saved = tmp_path/"out", logs(tmp_path/"out/checkpoint-2")
    for step in 1, 2:
        row = saved[step]
        print({k: row[k] for k in ("rewards/math_reward/mean", "rewards/vowels/mean", "loss", "grad_norm")})
        assert row["rewards/math_reward/mean"] in (0, .25, .5, .75, 1) and 0 < row["rewards/vowels/mean"] < 1
        assert row["grad_norm"] > 0 and abs(row["sampling/importance_sampling_ratio/mean"] - 1) < .01  # engine = policy
    assert "train: 2 steps, in out" in said and 'class="samples"' in (out/"report.html").read_text()  # what it said
    before, after = ((d/"model.safetensors").read_bytes() for d in (tmp_path/"smollm2", out))
    assert len(after) > 5e8 and before != after
