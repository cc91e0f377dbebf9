"""What a run says of itself reaches the loggers that people have, through Transformers' `report_to`."""
import json
import sys

import pytest

import run_all
from grpo_colab.compat import installed

RUN = """
import sys
from transformers.integrations import TensorBoardCallback
from grpo_colab import demo
trainer = demo.toy_trainer(sys.argv[1], demo.Recipe(steps=2))
trainer.args.logging_dir = sys.argv[1] + "/board"
trainer.add_callback(TensorBoardCallback)
trainer.train()
trainer.close(say=False)
"""
WANTED = ("reward", "loss", "entropy", "share/train", "share/rollouts", "share/sync", "trained/tokens_s",
          "sampling/sampling_logp_difference/mean")


@pytest.mark.skipif(not installed("tensorboard"), reason="needs tensorboard")
def test_tensorboard(tmp_path):
    "Its files hold TRL's metrics and ours, with the values of the trainer's own log."
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    code, text = run_all.run([sys.executable, "-c", RUN, tmp_path/"out"], tmp_path, 200)
    assert code == 0, text[-3000:]
    (board,) = {p.parent for p in tmp_path.rglob("events.out.tfevents*")}
    said = EventAccumulator(str(board)).Reload()
    tags = said.Tags()["scalars"]
    for name in WANTED: assert f"train/{name}" in tags, tags
    trace = [json.loads(line) for line in (tmp_path/"out/trace.jsonl").read_text().splitlines()]
    rewards = [e["args"]["mean"] for e in trace if (e["name"], e["ph"]) == ("reward", "C")]
    assert [s.value for s in said.Scalars("train/reward")] == pytest.approx(rewards)
