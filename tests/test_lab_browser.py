"""The lab in a browser: charts move, pause and resume work, and a saved notebook shows its last figures without a kernel.

Needs Chromium and Playwright; screenshots stay in runs/browser. Run with `pytest --flags=browser tests/test_lab_browser.py`.
"""
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHOTS = ROOT/"runs/browser"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.browser
POINTS = "() => Math.max(0, ...[...document.querySelectorAll('.js-plotly-plot')].flatMap(p => p.data.map(t => (t.x || []).length)))"


@pytest.fixture(scope="module")
def page():
    sync = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    if not CHROMIUM: pytest.skip("needs Chromium")
    SHOTS.mkdir(parents=True, exist_ok=True)
    with sync.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser.new_page(viewport=dict(width=1300, height=1500))
        browser.close()


def quickstart(folder, steps):
    "The quickstart up to the cell with the lab, for more steps."
    nb = json.loads((ROOT/"examples/quickstart.ipynb").read_text())
    last = next(i for i, c in enumerate(nb["cells"]) if "Lab(trainer)" in "".join(c["source"]))
    nb["cells"] = nb["cells"][:last + 1]
    for c in nb["cells"]:
        c["source"] = re.sub("max_steps=30", f"max_steps={steps}", "".join(c["source"]))
        if c["cell_type"] == "code": c |= dict(outputs=[], execution_count=None)
    (folder/"quickstart.ipynb").write_text(json.dumps(nb))


@contextlib.contextmanager
def served(folder, *command):
    "A server for the folder's notebooks, and its address."
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = os.environ | dict(PYTHONPATH=str(ROOT), JUPYTER_CONFIG_DIR=str(folder/"config"), IPYTHONDIR=str(folder/"ipython"),
                            JUPYTER_RUNTIME_DIR=str(folder/"runtime"), JUPYTERLAB_SETTINGS_DIR=str(folder/"lab"))
    env.pop("PLOTLY_RENDERER", None)
    log = (folder/f"{command[0]}.log").open("w")
    process = subprocess.Popen([sys.executable, "-m", *(o.replace("PORT", str(port)) for o in command)], cwd=folder, env=env,
                               stdout=log, stderr=log, start_new_session=True)
    url, end = f"http://127.0.0.1:{port}", time.time() + 60
    try:
        while time.time() < end:
            try: urllib.request.urlopen(f"{url}/static/x" if command[0] == "voila" else f"{url}/api", timeout=2)
            except urllib.error.HTTPError: break
            except OSError: time.sleep(.2)
            else: break
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(20)
        with contextlib.suppress(ProcessLookupError): os.killpg(process.pid, signal.SIGKILL)


def until(page, script, least, seconds=60):
    "Wait until a number on the page is large enough; the number."
    end = time.time() + seconds
    while (seen := page.evaluate(script)) < least and time.time() < end: page.wait_for_timeout(200)
    if seen < least: page.screenshot(path=SHOTS/"failed.png")
    assert seen >= least, (seen, least)
    return seen


def step(page):
    "The step that the line above the figures names."
    found = re.search(r"step ([\d,]+)", page.locator("text=/· step [0-9]/").first.inner_text())
    return int(found[1].replace(",", ""))


def check_live(page, name):
    "Charts move; paused they stand; they go on."
    until(page, POINTS, 1)
    first = until(page, POINTS, 3)
    until(page, POINTS, first + 2, 40)
    page.screenshot(path=SHOTS/f"{name}-running.png")
    page.get_by_role("button", name="Pause").click()
    page.wait_for_selector("text=/paused ·/", timeout=60_000)
    page.wait_for_timeout(2500)
    paused = step(page)
    page.wait_for_timeout(4000)
    assert step(page) == paused
    page.screenshot(path=SHOTS/f"{name}-paused.png")
    page.get_by_role("button", name="Go on").click()
    page.wait_for_selector("text=/running ·/", timeout=60_000)
    end = time.time() + 60
    while step(page) <= paused and time.time() < end: page.wait_for_timeout(300)
    assert step(page) > paused


def test_jupyterlab(page, tmp_path):
    quickstart(tmp_path, 3000)
    with served(tmp_path, "jupyterlab", "--no-browser", "--allow-root", "--ServerApp.port=PORT", "--IdentityProvider.token=",
                "--ServerApp.disable_check_xsrf=True", f"--ServerApp.root_dir={tmp_path}") as url:
        page.goto(f"{url}/lab/tree/quickstart.ipynb")
        page.wait_for_selector("text=/\\| Idle/", timeout=60_000)
        page.wait_for_timeout(1000)
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        select = page.get_by_role("button", name="Select", exact=True)
        with contextlib.suppress(Exception): select.click(timeout=2000)  # it may ask for the kernel
        check_live(page, "jupyterlab")
        page.keyboard.press("Control+s")
        page.wait_for_timeout(3000)
        for kernel in json.load(urllib.request.urlopen(f"{url}/api/kernels")):
            urllib.request.urlopen(urllib.request.Request(f"{url}/api/kernels/{kernel['id']}", method="DELETE"))
        outputs = [o for c in json.loads((tmp_path/"quickstart.ipynb").read_text())["cells"] for o in c.get("outputs", [])]
        assert sum("application/vnd.plotly.v1+json" in o.get("data", {}) for o in outputs) >= 4
        page.goto(f"{url}/lab/tree/quickstart.ipynb?reset")
        page.wait_for_selector(".js-plotly-plot", timeout=60_000)
        page.wait_for_timeout(2000)
        page.screenshot(path=SHOTS/"jupyterlab-saved.png")
        assert page.evaluate(POINTS) >= 3


def test_voila(page, tmp_path):
    quickstart(tmp_path, 3000)
    with served(tmp_path, "voila", "quickstart.ipynb", "--no-browser", "--port=PORT", "--Voila.ip=127.0.0.1") as url:
        page.goto(url, timeout=180_000)
        check_live(page, "voila")
