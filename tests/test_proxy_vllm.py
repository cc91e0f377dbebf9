"""The stand-in replica beside a real vLLM server, endpoint by endpoint, and the proxy before both."""
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import openai
import pytest

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
    for name in ("v1", "v2"):
        policy = get_peft_model(toys.toy_model(tokenizer), LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
        with torch.no_grad():
            for n, p in policy.named_parameters():
                if "lora_B" in n: p.normal_()
        policy.save_pretrained(where/name)
    return where


@pytest.fixture(scope="module")
def vllm(toy):
    "The address of a real server."
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
    try:
        for _ in range(600):
            assert server.poll() is None, "the server did not start"
            with socket.socket() as s:
                if s.connect_ex(("127.0.0.1", port)) == 0: break
            time.sleep(.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try: server.wait(15)
        except subprocess.TimeoutExpired: os.killpg(server.pid, signal.SIGKILL); server.wait()


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


def test_proxy_before_vllm(vllm, toy):
    "OpenAI's client, the same greedy tokens as without the proxy, and an adapter that changes them."
    async def main():
        async with Proxy(Members([vllm], patience=20)) as proxy:
            url = await proxy.start()
            async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none") as client, aiohttp.ClientSession() as http:
                ask = dict(prompt=[IDS, IDS[:20]], max_tokens=8, temperature=0, extra_body=dict(return_token_ids=True))
                async def tokens(c, **more):
                    return [x.token_ids for x in (await c.completions.create(**ask | more)).choices]
                async with openai.AsyncOpenAI(base_url=vllm + "/v1", api_key="none") as direct: want = await tokens(direct, model="toy")
                assert await tokens(client, model="toy") == want
                begun = time.perf_counter()
                async with http.post(url + "/v1/load_lora_adapter", json=dict(lora_name="v2", lora_path=str(toy/"v2"))) as r:
                    assert r.status == 200, await r.text()
                print(f"loaded and confirmed in {time.perf_counter() - begun:.3f} s")
                assert (await tokens(client, model="v2")) != want
                text = {0: "", 1: ""}
                async for chunk in await client.completions.create(model="v2", stream=True, **ask):
                    for c in chunk.choices: text[c.index] += c.text
                whole = await client.completions.create(model="v2", **ask)
                assert [text[0], text[1]] == [c.text for c in whole.choices]
                (row,) = proxy.status()["replicas"]
                assert row["hit_rate"] > .3 and abs(row["hit_rate"] - row["predicted_hit_rate"]) < .25, row
                async with http.post(url + "/v1/unload_lora_adapter", json=dict(lora_name="v2")) as r: assert r.status == 200
    asyncio.run(main())
