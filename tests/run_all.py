"""Run everything that proves the project; `make test` calls this.

    run_all.py                            exports, README, every notebook, tests/
    run_all.py nbs/04_engine.ipynb        this notebook alone
    run_all.py --flags "cuda slow"        with the cells and tests that carry these flags

A notebook runs through nbdev's own `test_nb`, in a process and an environment of its own, with a time limit. One that
nbdev would skip without a word has failed: what is not run is not tested. The last line is `N passed, N failed`.
"""
import argparse
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
TIMES = Path(sys.prefix)/"test-times.json"  # seconds of the last run, to start the longest first
LIMIT, PYTEST_LIMIT = 600, 1200  # s
SPOILERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "VLLM_", "PYTORCH_", "TORCH", "HF_HUB_",
            "TRANSFORMERS_", "TRL_", "PLOTLY_", "GRPO_COLAB_", "IN_TEST", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE",
            "MAKE", "MFLAGS", "CUDA_LAUNCH_BLOCKING", "OMP_NUM_THREADS")
SETTINGS = dict(HF_HUB_OFFLINE="1", VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1",
                PLOTLY_RENDERER="plotly_mimetype", TOKENIZERS_PARALLELISM="false", PYTHONUNBUFFERED="1",
                # two at once share two cores: one thread each, which sleeps when it has to wait
                OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive", VLLM_CPU_OMP_THREADS_BIND="nobind")

# What most notebooks import, and what takes 8 s: loaded once, in a process that forks for each notebook. None of it is ours, TRL or
# vLLM, whose import is part of what a notebook tests.
PRELOAD = ("torch", "torch._inductor.compile_fx", "transformers.trainer", "datasets", "pandas", "sympy", "openai", "accelerate",
           "plotly.graph_objects", "nbdev.test", "nbdev.process", "fastcore.test")
MANY = 8  # notebooks for which that is worth it

RUNNING = set()  # process groups


@dataclass
class Result:
    name: str
    ok: bool
    seconds: float = 0
    text: str = ""  # why it failed

    def show(self):
        print(f"{'ok  ' if self.ok else 'FAIL'}  {self.name:44} {self.seconds:6.1f} s", flush=True)
        if not self.ok: print("\n".join("      " + line for line in self.text.strip().splitlines()[-40:]), flush=True)


def clean_env() -> dict:
    "The environment without what other work may have left in it, with what tests need."
    return {k: v for k, v in os.environ.items() if not k.startswith(SPOILERS)} | SETTINGS


def _hear_ctrl_c():
    "A shell's background job ignores SIGINT, and so would every test of an interrupt in it."
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run(command: list, cwd: Path, limit: float) -> tuple[int | None, str]:
    "Exit code (None: ran over `limit` seconds) and output. What the command leaves running is ended, and a failure."
    with tempfile.TemporaryFile("w+", errors="replace") as out:
        p = subprocess.Popen(list(map(str, command)), cwd=cwd, env=clean_env(), stdin=subprocess.DEVNULL, stdout=out,
                             stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=_hear_ctrl_c)
        RUNNING.add(p.pid)
        try: code = p.wait(limit)
        except subprocess.TimeoutExpired: code = None
        finally: RUNNING.discard(p.pid)
        left = "" if code is None else left_behind(p.pid)
        if code is None or left: os.killpg(p.pid, signal.SIGKILL)
        p.wait()
        out.seek(0)
        text = out.read()
    return told(code, text, left, limit)


def told(code: int | None, text: str, left: str, limit: float) -> tuple[int | None, str]:
    "With what else went wrong."
    if code is None: text += f"\nran over its limit of {limit:.0f} s"
    if left: code, text = code or 1, f"{text}\nleft running: {left}"
    return code, text


def left_behind(group: int, patience: float = 5) -> str:
    "The commands of a process group that still run after `patience` seconds, which helpers need to notice the end."
    end = time.time() + patience
    while time.time() < end:
        try: os.killpg(group, 0)
        except ProcessLookupError: return ""
        time.sleep(.1)
    names = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try: fields, words = stat.read_text().rpartition(")")[2].split(), (stat.parent/"cmdline").read_bytes()
        except OSError: continue
        if int(fields[2]) == group and fields[0] != "Z": names.append(words.decode().replace("\0", " ")[:200])
    return "; ".join(names)


def one_notebook(path: Path, flags: list[str]) -> int:
    "In a process of its own: 0 when every cell that should run has run, 1 when one failed, 3 when nbdev would skip it."
    from nbdev.config import get_config
    from nbdev.frontmatter import FrontmatterProc
    from nbdev.process import NBProcessor
    from nbdev.test import test_nb
    cfg = get_config(path=path.parent)
    skip = set(cfg.tst_flags.split()) - set(flags)
    nb = NBProcessor(path, procs=FrontmatterProc, process=True).nb
    code = [c for c in nb.cells if c.cell_type == "code" and c.source.strip()]
    off = lambda c: c.directives_.get("eval:", [""])[0].lower() == "false" or skip & c.directives_.keys()
    runs = [c for c in code if not off(c)]
    if str(nb.frontmatter_.get("skip_exec", False)).lower() == "true" or not runs:
        print("skipped: skip_exec, or no cell that runs without flags")
        return 3
    ok, _ = test_nb(path, skip_flags=skip, basepath=cfg.config_path)
    print(f"nbdev ran {len(runs)} of {len(code)} code cells", flush=True)
    return 0 if ok else 1


def nursery(preload: list[str]) -> int | None:
    """A process in which nothing runs but forks: each line of its input is a notebook, its flags and a file for what it prints;
    it answers with the fork's process id, and with its exit code."""
    for name in preload:
        with suppress(ImportError): importlib.import_module(name)
    for line in iter(sys.stdin.readline, ""):
        path, flags, out = json.loads(line)
        pid = os.fork()
        if not pid:
            os.setsid()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            said = os.open(out, os.O_WRONLY | os.O_APPEND)
            for theirs, fd in ((os.open(os.devnull, os.O_RDONLY), 0), (said, 1), (said, 2)): os.dup2(theirs, fd)
            os.chdir(Path(path).parent)
            return one_notebook(Path(path), flags.split())
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


class Nursery:
    "That process, for one thread, which begins with its first notebook."
    def __init__(self, preload): self.preload, self.process = preload, None

    def run(self, path: Path, flags: str, limit: float) -> tuple[int | None, str]:
        "As `run`."
        self.process = self.process or subprocess.Popen(
            [sys.executable, __file__, "--nursery", *self.preload], env=clean_env(), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, bufsize=1, start_new_session=True)
        with tempfile.NamedTemporaryFile("r+", errors="replace") as out:
            print(json.dumps([str(path), flags, out.name]), file=self.process.stdin)
            pid = int(self.process.stdout.readline())
            RUNNING.add(pid)
            clock = threading.Timer(limit, os.killpg, (pid, signal.SIGKILL))
            clock.start()
            try: code = int(self.process.stdout.readline())
            finally: RUNNING.discard(pid)
            late = not clock.is_alive()
            clock.cancel()
            left = "" if late else left_behind(pid)
            if left: os.killpg(pid, signal.SIGKILL)
            text = out.read()
        return told(None if late else code, text, left, limit)

    def close(self):
        if self.process: self.process.communicate()


def test_notebook(path: Path, root: Path, flags: str, limit: float, nursery: Nursery) -> Result:
    start, name = time.time(), str(path.relative_to(root))
    code, text = nursery.run(path, flags, limit)
    if code == 0 and "nbdev ran " not in text: code, text = 1, text + "\nended before its last cell"
    return Result(name, code == 0, time.time() - start, text)


def check_exports(root: Path) -> list[str]:
    "The files of the package that `nbdev_export` would write otherwise, or not at all."
    with tempfile.TemporaryDirectory() as d:
        copy = Path(d)/root.name
        shutil.copytree(root/"nbs", copy/"nbs", ignore=shutil.ignore_patterns(".*"))
        shutil.copy(root/"settings.ini", copy)
        lib = get_lib(root)
        (copy/lib).mkdir()
        code, text = run([sys.executable, "-c", "from nbdev.doclinks import nbdev_export; nbdev_export()"], copy, 300)
        if code: return [f"nbdev_export failed: {text.strip()[-1500:]}"]
        old, new = ({p.name: p.read_bytes() for p in (top/lib).glob("*.py")} for top in (root, copy))
    return [f"{lib}/{n}" + ("" if n in new and n in old else " has no notebook" if n in old else " is missing")
            for n in sorted(old.keys() | new.keys()) if old.get(n) != new.get(n)]


def get_lib(root: Path) -> str:
    from configparser import ConfigParser
    ini = ConfigParser(delimiters=["="], interpolation=None)
    ini.read(root/"settings.ini")
    return ini["DEFAULT"]["lib_path"]


def check_readme(root: Path) -> list[str]:
    sys.path.insert(0, str(HERE))
    from readme import stale
    return stale(root)


def files(root: Path) -> set[str]:
    "What a test might leave in the checkout: everything but sources, caches, and runs/, where runs belong."
    tops = [root, *(p for n in ("nbs", "examples", "tests") for p in [root/n, *(root/n).rglob("*")] if p.is_dir())]
    hidden = ("__pycache__", ".pytest_cache", ".ipynb_checkpoints", ".hypothesis", ".ruff_cache", "runs")
    found = (p for top in tops if not any(h in top.parts for h in hidden) for p in top.iterdir())
    sources = (".py", ".ipynb", ".md")
    return {str(p.relative_to(root)) for p in found if p.suffix not in sources and p.name not in hidden}


def run_check(name: str, check, remedy: str) -> Result:
    "`check` returns what is wrong."
    start = time.time()
    try: wrong = check()
    except Exception as e: wrong = [repr(e)]
    return Result(name, not wrong, time.time() - start, "\n".join(wrong + [remedy]))


def test_file(path: Path, root: Path, flags: str) -> list[Result]:
    "A result for each test. A skipped one has failed, unless its reason says what this machine lacks: 'needs …'."
    start, name = time.time(), str(path.relative_to(root))
    with tempfile.TemporaryDirectory() as d:
        xml = Path(d)/"results.xml"
        code, text = run([sys.executable, "-m", "pytest", path, "-q", "--color=no", f"--junitxml={xml}", "-p", "no:cacheprovider",
                          f"--flags={flags}"], root, PYTEST_LIMIT)
        cases = list(ElementTree.parse(xml).getroot().iter("testcase")) if xml.exists() else []
    results, left_out = [], 0
    for case in cases:
        lacks = [c.get("message", "") for c in case if c.tag == "skipped" and c.get("message", "").startswith("needs ")]
        if lacks:
            print(f"left out  {case.get('name')}: {lacks[0]}", flush=True)
            left_out += 1
            continue
        bad = [child for child in case if child.tag in ("failure", "error", "skipped")]
        why = "\n".join(f"{b.tag}: {b.text or b.get('message')}" for b in bad)
        results.append(Result(f"{name}::{case.get('name')}", not bad, float(case.get("time", 0)), why))
    if code == 5 and " deselected" in text:  # pytest: all of them carry flags that were not asked for
        print(f"left out  {name}: needs --flags", flush=True)
    elif not (results or left_out) or (code and all(r.ok for r in results)):  # broke down, or left a process behind
        results.append(Result(name, False, time.time() - start, text))
    return results


def order(paths: list[Path], root: Path) -> list[Path]:
    "Longest first, as the last run had it; before a first run tests, examples, then notebooks that start engines."
    times = json.loads(TIMES.read_text()) if TIMES.exists() else {}
    starts = "Engine(", "Trainer(", "_trainer(", "run_demo(", "Popen(", "Fleet.local(", "Fleet("
    guess = lambda p: 1000 * (p.suffix == ".py") + 100 * (p.parent.name == "examples") + sum(p.read_text().count(w) for w in starts)
    return sorted(paths, key=lambda p: -times.get(str(p.relative_to(root)), guess(p)))


def run_paths(paths: list[Path], root: Path, flags: str, limit: float) -> list[Result]:
    "Notebooks and test files, at most two at once: more would only wait for each other's cores."
    times = json.loads(TIMES.read_text()) if TIMES.exists() else {}
    preload = PRELOAD if sum(p.suffix == ".ipynb" for p in paths) >= MANY else ()
    free = [Nursery(preload) for _ in range(2)]
    def work(path):
        start = time.time()
        if path.suffix == ".py": results = test_file(path, root, flags)
        else:
            mine = free.pop()
            results = [test_notebook(path, root, flags, limit, mine)]
            free.append(mine)
        for r in results: r.show()
        times[str(path.relative_to(root))] = round(time.time() - start, 1)
        return results
    pool = ThreadPoolExecutor(2)
    try: results = [r for some in pool.map(work, order(paths, root)) for r in some]
    except KeyboardInterrupt:
        for group in list(RUNNING): os.killpg(group, signal.SIGKILL)
        raise
    finally: pool.shutdown(cancel_futures=True)
    for nursery in free: nursery.close()
    try: TIMES.write_text(json.dumps(times, indent=1))
    except OSError: pass
    return results


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", type=Path)
    parser.add_argument("--flags", default="", help="flags whose cells and tests run too, separated by spaces")
    parser.add_argument("--root", type=Path, default=HERE.parent, help="the checkout")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds a notebook may take")
    parser.add_argument("--nursery", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.nursery is not None: return nursery(args.nursery)
    start, root, results = time.time(), args.root.resolve(), []
    before = files(root)
    def check(*what):
        results.append(run_check(*what))
        results[-1].show()
    notebooks = [p.resolve() for p in args.notebooks]
    if not notebooks:
        check("exports", lambda: check_exports(root), "Run nbdev_export; change notebooks, not the package.")
        check("README.md", lambda: check_readme(root), "Run make readme.")
        notebooks = [*root.glob("nbs/[!_.]*.ipynb"), *root.glob("examples/[!_.]*.ipynb")]
    tests = [] if args.notebooks else [*root.glob("tests/test_*.py")]
    results += run_paths(notebooks + tests, root, args.flags, args.limit)
    if not notebooks: results.append(Result("notebooks", False, 0, "there is none"))
    if not args.notebooks:
        check("no files left behind", lambda: sorted(files(root) - before), "Write to a temporary folder; remove it.")
    passed = sum(r.ok for r in results)
    failed = [r.name for r in results if not r.ok]
    print(f"\n{time.time() - start:.0f} s in all." + (f" Failed: {', '.join(failed)}" if failed else ""))
    print(f"{passed} passed, {len(failed)} failed")
    return 1 if failed or not results else 0


if __name__ == "__main__": sys.exit(main())
