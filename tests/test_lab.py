"""The lab in a process of its own: what a notebook's kernel does to it."""
import json
import sys

import run_all


def test_interrupted_and_ended(tmp_path):
    "An interrupt leaves the run alone; a second start is the same run; the process ends with a run in it, and leaves nothing."
    code, text = run_all.run([sys.executable, run_all.HERE/"lab_run.py", tmp_path/"out"], run_all.HERE.parent, 200)
    said = {row[0]: row[1:] for row in map(json.loads, (line for line in text.splitlines() if line.startswith("[\"")))}
    assert code == 0 and "left running" not in text, text[-3000:]
    assert said["begun"] == [True] and said["same run"] == [True, 1], text[-3000:]
    assert "not interrupted" not in said and "training goes on in the background" in said["interrupted"][0]
    assert said["goes on"] == [True, True]
    events = [json.loads(line) for line in (tmp_path/"out/trace.jsonl").read_text().splitlines()]
    assert [e["name"] for e in events if e["name"] in ("stopped", "interrupted")][-1:] == ["stopped"]
