"""`make setup` where it meets faults, in a copy of the project: each ends with the remedy, and the next run goes on."""
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOWHERE = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "nothing-here"}


@pytest.fixture
def checkout(tmp_path):
    "A copy of what set-up needs, in a folder whose name has a space."
    root = tmp_path/"a copy"
    shutil.copytree(ROOT/"grpo_colab", root/"grpo_colab", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("settings.ini", "setup.py", "pyproject.toml"): shutil.copy(ROOT/name, root)
    return root


def setup(root, *args, python=sys.executable, **env):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "MAKE"))} | NOWHERE | env
    command = [python, "-m", "grpo_colab.install", *args]
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)


def test_without_an_index(checkout):
    "The first run fails and says what to set; the second one does not take the half for the whole."
    for _ in range(2):
        done = setup(checkout, GRPO_COLAB_BACKEND="cpu")
        assert done.returncode == 1 and "PIP_FIND_LINKS" in done.stderr, done.stderr
        assert "Traceback" not in done.stderr and not (checkout/".venv/grpo_colab.json").exists()
    assert "there is none" not in done.stdout  # the environment that was made is used again


def test_bad_choices(checkout):
    done = setup(checkout, GRPO_COLAB_BACKEND="tpu")
    assert done.returncode == 1 and "must be cpu or gpu" in done.stderr
    done = setup(checkout, "--extra", "moon", GRPO_COLAB_BACKEND="cpu")
    assert done.returncode == 1 and "no extra 'moon'" in done.stderr
    assert not (checkout/".venv").exists()  # nothing was begun


def test_no_venv_module(checkout):
    "What Debian's python3 without python3-venv looks like."
    (checkout/"ensurepip.py").write_text("raise ImportError('split off')")
    done = setup(checkout, GRPO_COLAB_BACKEND="cpu")
    assert done.returncode == 1 and "apt install python3-venv" in done.stderr


def test_old_python(checkout):
    "A Python that is too old looks for a newer one, and says what to do when there is none."
    ini = checkout/"settings.ini"
    ini.write_text(ini.read_text().replace("min_python = 3.11", "min_python = 3.99"))
    done = setup(checkout)
    assert done.returncode == 1 and "Python 3.99 or newer is needed" in done.stderr


def test_outside_a_checkout(checkout):
    (checkout/"settings.ini").unlink()
    done = setup(checkout)
    assert done.returncode == 1 and "run set-up from a checkout" in done.stderr


def test_read_only_checkout(checkout):
    if os.geteuid() == 0:  # root may write anywhere: a file in the way does the same
        (checkout/".venv").write_text("")
    else: checkout.chmod(0o500)
    done = setup(checkout, GRPO_COLAB_BACKEND="cpu")
    checkout.chmod(0o700)
    assert done.returncode == 1 and "setup: failed" in done.stderr and "Traceback" not in done.stderr


def test_a_second_run_takes_no_time(checkout, tmp_path):
    "A stamp that fits is believed; one whose package is gone is not."
    program = ("import json, sys; from pathlib import Path; from grpo_colab.install import STAMP, plan\n"
               "from grpo_colab.packages import distributions\nvenv = Path('.venv')\n"
               "(venv/STAMP).write_text(json.dumps(dict(plan('.', 'cpu'), packages=distributions(venv))))")
    subprocess.run([sys.executable, "-m", "venv", ".venv"], cwd=checkout, check=True)
    subprocess.run([sys.executable, "-c", program], cwd=checkout, check=True)
    done = setup(checkout)
    assert (done.returncode, done.stderr) == (0, "") and ".venv is ready (cpu;" in done.stdout
    assert float(done.stdout.split(";")[1].split()[0]) < 3  # s
    shutil.rmtree(next((checkout/".venv").glob("lib/python3*/site-packages/pip-*.dist-info")))
    assert setup(checkout).returncode == 1  # goes to work, and finds no index
