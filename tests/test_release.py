"What somebody gets who installs it: a wheel that works without the checkout, and no surprises at import."
import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted((ROOT/"grpo_colab").glob("*.py"))
#: what runs at import all the same: file -> number of statements. Each names things for a library, or is for Triton's compiler
LISTED = {"colocate.py": 1, "config.py": 2, "rollout_worker.py": 1, "token_logps.py": 2, "varlen.py": 2, "vllm_server.py": 1, "writes.py": 3}
HOSTS = {"127.0.0.1", "localhost", "huggingface.co", "download.pytorch.org", "pypi.org", "github.com", "arxiv.org",
         "cdn.plot.ly"}  # the last for a report with plotlyjs="cdn", which nobody gets who does not ask


def run(*command, **kw):
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=env, **kw)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
    return done.stdout


def test_from_sdist_to_a_run(tmp_path):
    "sdist, wheel from it, a new environment, and the command. torch and vLLM come from the environment of the tests."
    source = tmp_path/"source"
    shutil.copytree(ROOT/"grpo_colab", source/"grpo_colab", ignore=shutil.ignore_patterns("__pycache__"))
    for f in ROOT.iterdir():
        if f.is_file(): shutil.copy(f, source)
    build = "import setuptools.build_meta as b; print(b.build_sdist('dist'))"
    run(sys.executable, "-c", build, cwd=source)
    sdist = next((source/"dist").glob("*.tar.gz"))
    with tarfile.open(sdist) as t: assert {"settings.ini", "CHANGELOG.md", "py.typed"} <= {Path(n).name for n in t.getnames()}
    quiet = ("-q", "--no-deps", "--no-build-isolation", "--no-index")
    run(sys.executable, "-m", "pip", "wheel", *quiet, "-w", tmp_path, sdist)
    venv.create(tmp_path/"env", with_pip=False)
    python = tmp_path/"env/bin/python"
    run(sys.executable, "-m", "pip", "--python", python, "install", *quiet, next(tmp_path.glob("*.whl")))
    site = next((tmp_path/"env/lib").glob("python3*/site-packages"))
    (site/"others.pth").write_text(sysconfig.get_path("purelib"))
    where = run(python, "-c", "import grpo_colab; print(grpo_colab.__file__)", cwd=tmp_path)
    assert where.startswith(str(site)), where
    command = tmp_path/"env/bin/grpo-colab"
    assert run(command, "--version", cwd=tmp_path).startswith("grpo-colab ") and "doctor" in run(command, "--help", cwd=tmp_path)
    assert "would break a run" in run(command, "doctor", cwd=tmp_path)
    tiny = "from grpo_colab import toys; t = toys.toy_tokenizer(); print(sum(p.numel() for p in toys.toy_model(t).parameters()))"
    assert int(run(python, "-c", tiny, cwd=tmp_path)) > 0


def test_no_code_runs_at_import():
    "A module's top level defines and names things: no loop, no `with`, no call whose result is thrown away, but LISTED."
    plain = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
    odd = []
    for p in MODULES:
        for n in ast.parse(p.read_text()).body:
            docstring = isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)
            optional = isinstance(n, ast.Try) and all(isinstance(m, plain) for m in n.body)
            command = isinstance(n, ast.If) and "__main__" in ast.unparse(n.test)
            if not (isinstance(n, plain) or docstring or optional or command): odd.append(f"{p.name}:{n.lineno} {ast.unparse(n)[:60]}")
    assert Counter(line.partition(":")[0] for line in odd) == LISTED, "\n".join(odd)


def test_nothing_is_sent_at_import(tmp_path):
    "No connection and no look-up, and nothing written to the working directory, when both trainers are imported."
    program = ("import sys\ndef hook(event, args):\n"
               "    if event in ('socket.connect', 'socket.getaddrinfo', 'socket.sendto'): raise SystemExit(f'{event} {args}')\n"
               "sys.addaudithook(hook)\nimport grpo_colab.colocate, grpo_colab.async_lora, grpo_colab.prefix_proxy\n")
    run(sys.executable, "-c", program, cwd=tmp_path)
    assert not list(tmp_path.iterdir())


def test_no_telemetry():
    "No address but those that are known, and nothing that reports."
    text = {p.name: p.read_text() for p in MODULES}
    hosts = {(name, h) for name, t in text.items() for h in re.findall(r"https?://([\w.-]+\.\w+)", t)}
    assert not (strange := {(n, h) for n, h in hosts if h not in HOSTS and not h.endswith(".hf.jobs")}), strange
    assert not [n for n, t in text.items() if re.search(r"sentry|posthog|segment\.io|mixpanel|telemetry\s*=\s*True", t, re.I)]


def test_remote_code_is_off_unless_asked():
    from grpo_colab.async_args import AsyncLoRAGRPOConfig
    from trl import ModelConfig
    given = {f.name: f.default for c in (AsyncLoRAGRPOConfig, ModelConfig) for f in c.__dataclass_fields__.values()}
    assert given["trust_remote_code"] is False
    assert not [p.name for p in MODULES if re.search(r"trust.remote.code['\"]?\s*[=:]\s*True", p.read_text())]
