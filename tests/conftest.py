"""What every test gets: no network, one way to leave tests out (flags, named as nbdev's), the checkout on the path."""
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT/"tests")]
for name, value in dict(HF_HUB_OFFLINE="1", VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR",
                        TOKENIZERS_PARALLELISM="false", PLOTLY_RENDERER="plotly_mimetype", OMP_NUM_THREADS="1",
                        OMP_WAIT_POLICY="passive", VLLM_CPU_OMP_THREADS_BIND="nobind",
                        TORCH_COMPILE_DISABLE="1").items():  # an engine starts in 3 s; the notebooks run the compiled one
    os.environ.setdefault(name, value)  # before any test imports vLLM, which reads them at import


def pytest_addoption(parser):
    parser.addoption("--flags", default="", help="run tests marked with these too: cuda, slow, browser")


def pytest_collection_modifyitems(config, items):
    "Leave out tests whose flag was not given. They are deselected, not skipped: a skipped test fails `make test`."
    skip = {"cuda", "slow", "browser"} - set(config.getoption("--flags").split())
    out = [i for i in items if skip & {m.name for m in i.iter_markers()}]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [i for i in items if i not in out]
