"""The stand-in replica beside a real vLLM server, endpoint by endpoint, and the proxy before both."""
import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import openai
import pytest

from grpo_colab.lora_sync import AdapterStore
from grpo_colab.members import Members
from grpo_colab.prefix_proxy import Proxy
from grpo_colab.replicas import kv_cache
from grpo_colab.standin_replica import Standin

ROOT = Path(__file__).resolve().parent.parent
IDS = [7 + i % 40 for i in range(40)]


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    "A checkpoint, and two adapters of it."
    import torch
    from peft import LoraConfig, get_peft_model

    from grpo_colab import toys
    where = tmp_path_factory.mktemp("toy")
    tokenizer = toys.toy_tokenizer()
    toys.save_toy(where/"model", toys.toy_model(tokenizer), tokenizer)
    torch.manual_seed(0)
    for name in ("v1", "v2"):
        policy = get_peft_model(toys.toy_model(tokenizer), LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
        with torch.no_grad():
            for n, p in policy.named_parameters():
                if "lora_B" in n: p.normal_()
        policy.save_pretrained(where/name)
    return where


def start(toy):
    "A real server: its process and its address."
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = os.environ | dict(VLLM_ALLOW_RUNTIME_LORA_UPDATING="1", VLLM_SERVER_DEV_MODE="1", VLLM_CPU_KVCACHE_SPACE="1",
                            HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR")
    flags = ("--model", str(toy/"model"), "--served-model-name", "toy", "--host", "127.0.0.1", "--port", str(port),
             "--enable-lora", "--max-loras", "4", "--max-lora-rank", "8", "--enforce-eager", "--dtype", "float32",
             "--enable-prompt-tokens-details", "--num-gpu-blocks-override", "200", "--block-size", "16", "--max-num-seqs", "8")
    server = subprocess.Popen([sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags], env=env,
                              start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return server, f"http://127.0.0.1:{port}"


def end(server):
    "With its engine's process, also when the server itself is gone."
    with suppress(ProcessLookupError): os.killpg(server.pid, signal.SIGTERM)
    try: server.wait(15)
    except subprocess.TimeoutExpired: pass
    with suppress(ProcessLookupError): os.killpg(server.pid, signal.SIGKILL)
    server.wait()


@pytest.fixture(scope="module")
def servers(toy):
    "Two real servers: processes and addresses."
    both = [start(toy) for _ in range(2)]
    try:
        for server, url in both:
            for _ in range(900):
                assert server.poll() is None, "the server did not start"
                with socket.socket() as s:
                    if s.connect_ex(("127.0.0.1", int(url.rpartition(":")[2]))) == 0: break
                time.sleep(.2)
        yield both
    finally:
        for server, _ in both: end(server)


@pytest.fixture
def vllm(servers): return servers[0][1]


def shape(x):
    "Keys and types, of what both have to say."
    if isinstance(x, dict): return {k: shape(v) for k, v in x.items()}
    if isinstance(x, list): return [shape(x[0])] if x else []
    return type(x).__name__


def within(ours, theirs, path=""):
    "What the stand-in says that vLLM does not say, or says in another form."
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return [f for k in ours for f in (within(ours[k], theirs[k], f"{path}.{k}") if k in theirs else [f"{path}.{k}"])]
    if isinstance(ours, list) and isinstance(theirs, list): return within(ours[0], theirs[0], path) if ours and theirs else []
    return [] if ours == theirs or "NoneType" in (ours, theirs) else [f"{path}: {ours}, not {theirs}"]


async def answers(url, toy):
    "Status and shape of everything that the proxy uses, in order."
    v1 = dict(lora_name="v1", lora_path=str(toy/"v1"))
    half = toy/"half"
    half.mkdir(exist_ok=True)
    (half/"adapter_config.json").write_text((toy/"v1/adapter_config.json").read_text())
    ask = dict(model="toy", prompt=IDS, max_tokens=4, return_token_ids=True)
    asked = [("GET", "/health"), ("GET", "/v1/models"), ("GET", "/is_paused"), ("GET", "/is_sleeping"),
        ("POST", "/v1/load_lora_adapter", dict(lora_name="v1", lora_path=str(toy/"missing"))),
        ("POST", "/v1/load_lora_adapter", dict(lora_name="v1", lora_path=str(half))),
        ("POST", "/v1/load_lora_adapter", v1), ("POST", "/v1/load_lora_adapter", v1), ("GET", "/v1/models"),
        ("POST", "/v1/completions", ask), ("POST", "/v1/completions", ask), ("POST", "/v1/completions", ask | dict(model="none")),
        ("POST", "/v1/completions", ask | dict(prompt=[IDS, IDS], n=2)), ("POST", "/v1/completions", ask | dict(prompt=[])),
        ("POST", "/v1/chat/completions", dict(model="v1", messages=[dict(role="user", content="1+1")], max_tokens=2)),
        ("POST", "/reset_prefix_cache"), ("POST", "/pause?mode=keep&clear_cache=false"), ("GET", "/is_paused"), ("POST", "/resume"),
        ("POST", "/v1/unload_lora_adapter", dict(lora_name="v1")), ("POST", "/v1/unload_lora_adapter", dict(lora_name="v1")),
        ("GET", "/nothing")]
    said = []
    async with aiohttp.ClientSession(url) as http:
        for method, path, *body in asked:
            async with http.request(method, path, json=body[0] if body else None) as r:
                text = await r.text()
                said.append((method, path, r.status, json.loads(text) if r.content_type.endswith("json") and text else None))
        async with http.get("/metrics") as r: blocks = kv_cache(await r.text())
    return said, blocks


@asynccontextmanager
async def standin(blocks=200):
    replica = Standin(blocks=blocks)
    try: yield await replica.start()
    finally: await replica.stop()


def test_standin_is_like_vllm(vllm, toy):
    async def main():
        async with standin() as url: return await answers(url, toy), await answers(vllm, toy)
    (ours, blocks), (theirs, real) = asyncio.run(main())
    assert blocks == real == (199, 16)
    for (method, path, status, said), (*_, status_, said_) in zip(ours, theirs):
        assert status == status_, (method, path, said, said_)
        assert within(shape(said), shape(said_)) == [], (method, path)
    cached = [[s[3]["usage"]["prompt_tokens_details"]["cached_tokens"] for s in said if s[1] == "/v1/completions" and s[2] == 200]
              for said in (ours, theirs)]
    assert cached[0][:2] == cached[1][:2] == [0, 32]


async def shown_late(here, there, seconds):
    "Copy what is in one directory to another, so much later, the weights half first: a mount that shows a version late."
    await asyncio.sleep(seconds)
    for path in sorted(here.rglob("*")):
        to = there/path.relative_to(here)
        if path.is_dir(): to.mkdir(parents=True, exist_ok=True)
        elif path.suffix != ".safetensors": shutil.copy(path, to)
        else:
            to.write_bytes(path.read_bytes()[:1000])
            await asyncio.sleep(.5)
            shutil.copy(path, to)


def test_version_that_is_seen_late(servers, toy, tmp_path):
    "Published here, mounted elsewhere and seen there 2 s later: both servers have it, and answer as PEFT does."
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    policy = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(toy/"model", dtype=torch.float32), toy/"v1")
    here, there = tmp_path/"here", tmp_path/"there"
    with torch.no_grad(): want = policy.generate(torch.tensor([IDS]), max_new_tokens=8, do_sample=False)[0, len(IDS):].tolist()

    async def main():
        async with Proxy(Members([url for _, url in servers], patience=30, period=.2)) as proxy:
            url = await proxy.start()
            with AdapterStore(here, base=str(toy/"model"), max_rank=8, seen_as=str(there)) as store:
                adapter, begun = store.publish(policy, 1), time.perf_counter()
                mount = asyncio.create_task(shown_late(here, there, 2.))
                async with aiohttp.ClientSession() as http:
                    async with http.post(url + "/v1/load_lora_adapter",
                                         json=dict(lora_name=adapter.name, lora_path=adapter.path)) as r:
                        assert r.status == 200, await r.text()
                    took = time.perf_counter() - begun
                    await mount
                    for _, one in servers:
                        ask = dict(model=adapter.name, prompt=IDS, max_tokens=8, temperature=0, return_token_ids=True)
                        async with http.post(one + "/v1/completions", json=ask) as r:
                            assert (await r.json())["choices"][0]["token_ids"] == want
                    async with http.post(url + "/v1/unload_lora_adapter", json=dict(lora_name=adapter.name)) as r:
                        assert r.status == 200
                return took
    took = asyncio.run(main())
    print(f"seen after 2.5 s, confirmed by both after {took:.2f} s")
    assert 2.5 <= took < 20


def test_proxy_before_two(servers, toy):
    "OpenAI's client, the same greedy tokens as without the proxy, an adapter that changes them on both; then one is killed."
    (_, direct), (victim, lost) = servers
    async def main():
        async with Proxy(Members([direct, lost], patience=30, period=.2)) as proxy:
            url = await proxy.start()
            assert len(proxy.members.live) == 2
            async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none") as client, aiohttp.ClientSession() as http:
                ask = dict(max_tokens=8, temperature=0, extra_body=dict(return_token_ids=True))
                prompts = [[7 + (i * k) % 40 for i in range(40)] for k in (1, 3, 7, 9)]
                async def tokens(c, **more):
                    return [x.token_ids for x in (await c.completions.create(**ask | dict(prompt=prompts) | more)).choices]
                async with openai.AsyncOpenAI(base_url=direct + "/v1", api_key="none") as c: want = await tokens(c, model="toy")
                assert await tokens(client, model="toy") == want
                begun = time.perf_counter()
                async with http.post(url + "/v1/load_lora_adapter", json=dict(lora_name="v2", lora_path=str(toy/"v2"))) as r:
                    assert r.status == 200, await r.text()
                print(f"loaded and confirmed on both in {time.perf_counter() - begun:.3f} s")
                tuned = await tokens(client, model="v2")
                assert tuned != want
                text = dict.fromkeys(range(4), "")
                async for chunk in await client.completions.create(model="v2", stream=True, prompt=prompts, **ask):
                    for c in chunk.choices: text[c.index] += c.text
                whole = await client.completions.create(model="v2", prompt=prompts, **ask)
                assert list(text.values()) == [c.text for c in whole.choices]
                rows = proxy.members.router.report().values()
                assert all(r["requests"] > 3 for r in rows)  # both had a part
                cached, predicted = (sum(r[k] for r in rows) for k in ("cached", "predicted"))
                assert predicted == 4 * 2 * 32  # under v2 each prompt's two full blocks, the second and the third time
                cached -= 4 * 32  # a stream says nothing of it, as nobody asked, so the third time alone
                assert cached in range(0, 129, 32)  # the base model's, of prompts that were sent past the proxy to the same server
                os.killpg(victim.pid, signal.SIGKILL); victim.wait()
                assert await tokens(client, model="v2") == tuned  # the other one answers for both
                assert [up.url for up in proxy.members.live] == [direct]
                async with http.post(url + "/v1/unload_lora_adapter", json=dict(lora_name="v2")) as r: assert r.status == 200
    asyncio.run(main())
