"""Fleets of real vLLM servers whose engines, parents and proxies are killed; nothing may be left, and nothing twice."""
import asyncio
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from grpo_colab.fleet import Fleet
from grpo_colab.keeper import Lease, kin, leases_folder, processes
from grpo_colab.standin_replica import Standin
from grpo_colab.watched import FleetError

ROOT = Path(__file__).resolve().parent.parent
SMALL = dict(name="toy", dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=4, lora_rank=8,
             num_gpu_blocks_override=100, progress=False)
PARENT = """
import json, sys, time
from grpo_colab.fleet import Fleet
model, gpu, options = sys.argv[1:]
with Fleet.local(1, model, gpus=[gpu], **json.loads(options)) as fleet:
    print(json.dumps((0, fleet.proxy(), "")), flush=True)
    told = None
    while True:
        status = fleet.status()[0]
        if (now := (status["starts"], status["state"], status["why"])) != told: print(json.dumps(now), flush=True)
        told = now
        time.sleep(.05)
"""


def wait_for(true, what, seconds=240):
    end = time.monotonic() + seconds
    while not (value := true()):
        assert time.monotonic() < end, f"did not happen: {what}"
        time.sleep(.05)
    return value


def ask(url, body=None):
    "What a server says, or None."
    data = json.dumps(body).encode() if body else None
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, {"content-type": "application/json"}), timeout=60) as r:
            return json.loads(r.read())
    except OSError: return None


def sampled(url, model):
    "Greedy tokens of a prompt."
    said = ask(url + "/completions", dict(model=model, prompt=[7, 8, 9] * 8, max_tokens=8, temperature=0, return_token_ids=True))
    return said and said["choices"][0]["token_ids"]


def alive(pids): return pids & set(processes())


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    "A checkpoint, and beside it an adapter that changes what it says."
    import torch
    from peft import LoraConfig, get_peft_model

    from grpo_colab import toys
    where, tokenizer = tmp_path_factory.mktemp("toy")/"model", toys.toy_tokenizer()
    toys.save_toy(where, toys.toy_model(tokenizer), tokenizer)
    torch.manual_seed(0)
    policy = get_peft_model(toys.toy_model(tokenizer), LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    with torch.no_grad():
        for n, p in policy.named_parameters():
            if "lora_B" in n: p.normal_()
    policy.save_pretrained(where.parent/"v1")
    return where


@contextmanager
def parent(model, gpu):
    "A process that has a fleet of one server on `gpu`, which is a name only: the server is on the CPU."
    env = os.environ | dict(PYTHONPATH=str(ROOT), TMPDIR=str(model.parent))  # a killed parent leaves its logs there
    p = subprocess.Popen([sys.executable, "-c", PARENT, str(model), gpu, json.dumps(SMALL)], env=env, stdout=subprocess.PIPE,
                         stderr=subprocess.DEVNULL, text=True)
    try: yield p
    finally:
        p.kill()
        p.wait()


def told(p, start, state=None):
    "Read what the parent says of its server until it says that; then the rest. The proxy's address is start 0."
    while line := p.stdout.readline():
        said = json.loads(line)
        if said[0] == start and state in (None, said[1]): return said[1]
        assert said[1] not in ("failed", "ended"), said
    raise AssertionError(f"the parent ended, and never said {start} {state}")


@pytest.mark.slow
def test_engine_and_parent_are_killed(model):
    "The engine: a new server with its adapter. The parent: nothing is left, and the GPU is free from then on, not before."
    gpu = f"toy-{os.getpid()}"
    with parent(model, gpu) as p:
        url = told(p, 0)
        assert ask(url + "/load_lora_adapter", dict(lora_name="v1", lora_path=str(model.parent/"v1")))
        tokens = sampled(url, "v1")
        assert tokens and tokens != sampled(url, "toy")
        told(p, 1, "up")
        proxies = {q for q in kin(p.pid) if "grpo_colab.proxy" in Path(f"/proc/{q}/cmdline").read_text()}
        first = kin(p.pid) - proxies
        (engine,) = [q for q in first if Path(f"/proc/{q}/comm").read_text().startswith("VLLM::Engine")]
        os.kill(engine, signal.SIGKILL)
        told(p, 2, "up")
        wait_for(lambda: sampled(url, "v1") == tokens, "the adapter on the new server", 60)
        second = kin(p.pid)
        assert not alive(first) and len(second - proxies) >= 4  # keeper, server, engine, worker
        with pytest.raises(BlockingIOError, match="is in use by process"): Lease(f"gpu-{gpu}", 0)
        p.kill()
        lease = Lease(f"gpu-{gpu}", 60)  # as the next fleet takes it
        assert not alive(second)
        lease.close()
    assert not (leases_folder()/f"gpu-{gpu}.lease").exists()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_stopped_while_it_starts(model, signum):
    "Ctrl-C is heard by Python and closes the fleet; SIGTERM ends Python at once, and the keeper closes it."
    with parent(model, f"toy-{os.getpid()}") as p:
        family = wait_for(lambda: len(f := kin(p.pid)) >= 2 and f, "a keeper and a server")
        p.send_signal(signum)
        p.wait(60)
        wait_for(lambda: not alive(family), "the end of all", 60)


def test_cause_is_named(tmp_path):
    (tmp_path/"empty").mkdir()
    before = kin(os.getpid())
    with pytest.raises(FleetError) as e: Fleet.local(1, str(tmp_path/"empty"), gpus=[], **SMALL)
    assert "replica-0 did not start" in str(e.value) and "folder with config.json" in str(e.value), e.value
    assert not alive(kin(os.getpid()) - before)


def test_proxy_is_killed(tmp_path):
    "It comes back at its address and has forgotten nothing."
    for file in ("adapter_config.json", "adapter_model.safetensors"): (tmp_path/file).write_text("{}")
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    def run(what): return asyncio.run_coroutine_threadsafe(what, loop).result(60)
    async def replica(): return Standin()
    replicas = [run(replica()) for _ in range(2)]

    with Fleet.urls([run(r.start()) for r in replicas], base="toy") as fleet:
        url = fleet.proxy()
        assert fleet.proxy() == url
        assert ask(url + "/load_lora_adapter", dict(lora_name="v1", lora_path=str(tmp_path)))
        (child,) = kin(fleet._proxy.keeper.pid)
        os.kill(child, signal.SIGKILL)
        wait_for(lambda: fleet._proxy.starts == 2 and fleet._proxy.state == "up", "a new proxy", 60)
        names = [m["id"] for m in ask(url + "/models")["data"]]
        assert names == ["toy", "v1"]
        assert ask(url + "/completions", dict(model="v1", prompt=[1, 2], max_tokens=2))["choices"]
        family = kin(fleet._proxy.keeper.pid) | {fleet._proxy.keeper.pid}
    assert not alive(family)
    assert [list(r.adapters) for r in replicas] == [["v1"]] * 2  # servers that were there are left as they are
    for r in replicas: run(r.stop())
    loop.call_soon_threadsafe(loop.stop)


@pytest.fixture
def hub():
    "The Hub's API and, at the same address, the servers of its Jobs. `hub.jobs` by id, `hub.sent` what the client sent."
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            what = self.path.partition("?")[0].removeprefix("/api/jobs/me").strip("/")
            if what == "health": return self.say({}, 200 if server.well else 503)
            if what == "api/whoami-v2": return self.say(dict(name="me"))
            return self.say(server.jobs[what] if what else list(server.jobs.values()))
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or "null")
            server.sent.append((self.path, body, self.headers["authorization"]))
            if self.path.endswith("/cancel"):
                job = server.jobs[self.path.split("/")[-2]]
                job["status"] = dict(stage="CANCELED")
            else:
                job = dict(id=f"job-{len(server.jobs)}", owner=dict(id="1", name="me", type="user"),
                           status=dict(stage="RUNNING", exposeUrls=[server.url]))
                server.jobs[job["id"]] = job
            self.say(job)
        def say(self, what, status=200):
            data = json.dumps(what).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        def log_message(self, *args): pass
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.jobs, server.sent, server.well, server.url = {}, [], True, f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_jobs(hub, monkeypatch):
    "A fleet of Jobs by the real client: up, seen to be over, cancelled at the end and when one does not come up."
    from huggingface_hub import HfApi, constants
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    api = HfApi(endpoint=hub.url, token="hf_toy")
    bucket = dict(volumes={"/adapters": "hf://buckets/me/adapters"})
    with Fleet.jobs(2, "me/model", "h200", "2h", name="toy", api=api, progress=False, lora_rank=32, job=bucket) as fleet:
        assert [r["state"] for r in fleet.status()] == ["up", "up"] and fleet.base == "toy"
        assert [u.key for u in fleet.upstreams()] == ["hf_toy"] * 2  # the Hub asks for it before a request gets to the port
        path, body, token = hub.sent[0]
        flags = dict(zip(body["command"], body["command"][1:]))
        assert (path, token, body["flavor"], body["timeoutSeconds"]) == ("/api/jobs/me", "Bearer hf_toy", "h200", 7200)
        assert (flags["--max-lora-rank"], flags["--host"], flags["--port"]) == ("32", "0.0.0.0", "8000")
        assert body["volumes"] == [dict(type="bucket", source="me/adapters", mountPath="/adapters", readOnly=True)]
        hub.jobs["job-1"]["status"] = dict(stage="ERROR", message="out of memory")
        seen = fleet.status()
        assert [r["state"] for r in seen] == ["up", "failed"] and "ERROR: out of memory" in seen[1]["why"]
    assert [j["status"]["stage"] for j in hub.jobs.values()] == ["CANCELED", "ERROR"]
    hub.well = False
    with pytest.raises(FleetError, match="larger patience"): Fleet.jobs(1, "m", "h200", "2h", api=api, progress=False, patience=0)
    assert hub.jobs["job-2"]["status"]["stage"] == "CANCELED" and len(hub.jobs) == 3
