"""The runner of `make test` on a made-up project: whatever is wrong with it must be seen."""
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_raw_cell

import readme
import run_all

SETTINGS = """[DEFAULT]
lib_name = toylib
repo = toylib
lib_path = toylib
nbs_path = nbs
version = 0.0.1
user =
branch = main
author = nobody
git_url =
doc_host =
doc_baseurl = /
update_pyproject = False
tst_flags = cuda slow browser
"""


def notebook(path: Path, *cells: str):
    "Write a notebook; a cell that begins with `# ` or `---` is text."
    kinds = {"# ": new_markdown_cell, "--": new_raw_cell}
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(new_notebook(cells=[kinds.get(c[:2], new_code_cell)(c) for c in cells]), path)


@pytest.fixture
def project(tmp_path):
    "A project in order: one module, one README, one test."
    root = tmp_path/"toylib"
    notebook(root/"nbs/00_core.ipynb", "#| default_exp core", "# core\n\n> one line", "#| export\ndef two(): return 2",
             "assert two() == 2")
    notebook(root/"nbs/index.ipynb", "#| hide\nimport os", "# Toy\n\nSee [core](00_core.ipynb).", "1 + 1")
    (root/"settings.ini").write_text(SETTINGS)
    (root/"toylib").mkdir()
    (root/"tests").mkdir()
    (root/"tests/conftest.py").write_text("def pytest_addoption(parser): parser.addoption('--flags', default='')")
    (root/"tests/test_core.py").write_text("def test_one(): pass")
    subprocess.run([sys.executable, "-c", "from nbdev.doclinks import nbdev_export as e; e()"], cwd=root, check=True,
                   env=run_all.clean_env())
    readme.write(root)
    return root


def go(root, *args):
    "Exit code, output and the counts of the last line."
    code, text = run_all.run([sys.executable, run_all.__file__, "--root", root, *args], root, 120)
    last = re.fullmatch(r"(\d+) passed, (\d+) failed", text.strip().splitlines()[-1])
    assert last, text
    return code, text, (int(last[1]), int(last[2]))


def test_all_in_order(project):
    code, text, counts = go(project)
    assert (code, counts) == (0, (6, 0)), text  # exports, README, two notebooks, one test, nothing left behind


@pytest.mark.parametrize("cell, shown", [
    ("assert two() == 3, 'two is not three'", "two is not three"),
    ("import os; os._exit(0)", "ended before its last cell"),
    ("import time; time.sleep(60)", "ran over its limit of 8 s"),
    ("import subprocess; p = subprocess.Popen(['sleep', '77'])", "left running: sleep 77"),
])
def test_failing_notebook(project, cell, shown):
    notebook(project/"examples/bad.ipynb", "def two(): return 2", cell)
    code, text, counts = go(project, project/"examples/bad.ipynb", project/"nbs/00_core.ipynb", "--limit", "8")
    assert (code, counts) == (1, (1, 1)), text
    assert shown in text


@pytest.mark.parametrize("cells", [
    ("---\nskip_exec: true\n---", "assert False"),
    ("# Title\n\n- skip_exec: true", "assert False"),  # nbdev takes it from here, too
    ("#| cuda\nassert False",),
    ("#| eval: false\nassert False",),
])
def test_skipped_notebook_has_failed(project, cells):
    notebook(project/"nbs/01_skipped.ipynb", *cells)
    code, text, counts = go(project, project/"nbs/01_skipped.ipynb")
    assert (code, counts) == (1, (0, 1)) and "skipped" in text


def test_flags_are_passed_on(project):
    notebook(project/"nbs/01_gpu.ipynb", "a = 1", "#| cuda\nraise ValueError('ran the cuda cell')")
    assert go(project, project/"nbs/01_gpu.ipynb")[0] == 0
    code, text, _ = go(project, project/"nbs/01_gpu.ipynb", "--flags", "cuda")
    assert code == 1 and "ran the cuda cell" in text


def test_notebooks_do_not_see_each_others_environment(project):
    notebook(project/"nbs/01_a.ipynb", "import os\nassert 'LEAK' not in os.environ\nos.environ['LEAK'] = '1'")
    notebook(project/"nbs/02_b.ipynb", "import os\nassert 'LEAK' not in os.environ\nos.environ['LEAK'] = '1'")
    assert go(project, project/"nbs/01_a.ipynb", project/"nbs/02_b.ipynb")[2] == (2, 0)


def test_spoiling_variables_are_removed(monkeypatch):
    for name in ("RANK", "MASTER_PORT", "VLLM_USE_V1", "PYTORCH_ALLOC_CONF", "IN_TEST"): monkeypatch.setenv(name, "3")
    monkeypatch.setenv("HOME", "/home/somebody")
    env = run_all.clean_env()
    assert not {"RANK", "MASTER_PORT", "VLLM_USE_V1", "PYTORCH_ALLOC_CONF", "IN_TEST"} & env.keys()
    assert env["HOME"] == "/home/somebody" and env["HF_HUB_OFFLINE"] == "1"


def test_stale_exports_are_named(project):
    core = project/"toylib/core.py"
    core.write_text(core.read_text().replace("return 2", "return 3"))
    (project/"toylib/by_hand.py").write_text("x = 1\n")
    notebook(project/"nbs/01_more.ipynb", "#| default_exp more", "#| export\nx = 1", "assert x == 1")
    wrong = run_all.check_exports(project)
    assert wrong == ["toylib/_modidx.py", "toylib/by_hand.py has no notebook", "toylib/core.py",
                     "toylib/more.py is missing"]


def test_stale_readme_is_named(project):
    assert readme.stale(project) == []
    text = (project/"README.md").read_text()
    assert "import os" not in text and "[core](nbs/00_core.ipynb)" in text
    (project/"README.md").write_text(text + "by hand")
    (project/"README_files").mkdir()
    (project/"README_files/old.png").touch()
    assert readme.stale(project) == ["README.md", "README_files/old.png"]
    readme.write(project)
    assert readme.stale(project) == []


def test_broken_tests_and_leftovers(project):
    (project/"tests/test_core.py").write_text(
        "import pytest\ndef test_bad(): assert 1 == 2\ndef test_skipped(): pytest.skip('no reason')\n"
        "def test_litters(): open('nbs/litter.txt', 'w')\n")
    code, text, counts = go(project)
    assert (code, counts) == (1, (5, 3)), text  # a failed and a skipped test, and what the third left
    assert "nbs/litter.txt" in text and "skipped: " in text


def test_nothing_to_run_is_a_failure(project):
    (project/"tests/test_core.py").write_text("def broken(:")
    for nb in project.glob("nbs/*.ipynb"): nb.unlink()
    code, text, counts = go(project)
    assert code == 1 and counts[0] <= 1, text


def test_longest_first(project, tmp_path, monkeypatch):
    monkeypatch.setattr(run_all, "TIMES", tmp_path/"times.json")
    paths = [project/"nbs/00_core.ipynb", project/"nbs/index.ipynb"]
    run_all.TIMES.write_text('{"nbs/00_core.ipynb": 1, "nbs/index.ipynb": 9}')
    assert run_all.order(paths, project) == paths[::-1]
