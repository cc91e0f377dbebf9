"""The proxy under malformed requests, under load with replicas that are killed and restarted, killed itself, and behind TLS."""
import asyncio
import json
import os
import random
import shutil
import ssl
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import pytest

from grpo_colab.desired_state import LOAD, read_state
from grpo_colab.guard import ROUTES, Tokens
from grpo_colab.members import Members
from grpo_colab.prefix_proxy import Proxy
from grpo_colab.proxy import PROGRAM
from grpo_colab.standin_replica import Standin, answer_ids, answer_text

USER, CHIEF = "user" * 8, "chief" * 8


def adapter(path: Path) -> str:
    path.mkdir()
    for file in ("adapter_config.json", "adapter_model.safetensors"): (path/file).write_text("{}")
    return str(path)


def malformed(rng: random.Random) -> bytes:
    "A request with something wrong in it, or all of it."
    good = json.dumps(dict(model="toy", prompt=[1, 2, 3], max_tokens=1)).encode()
    path = rng.choice(["/v1/completions", "/v1/chat/completions", "/pause", "/v1/load_lora_adapter", "//pause", "/%70ause", "/\xff"])
    body = rng.choice([b"", b"{", b"[]", good[:rng.randrange(len(good))], bytes(rng.randrange(256) for _ in range(60)),
                       b"[" * 5000, b'{"model": 7}', b'{"model": "toy", "messages": 3}', b'{"model": "toy", "prompt": {"a": []}}'])
    length = rng.choice([len(body), len(body), len(body), max(0, len(body) - 1), -1, "x"])
    method, version = rng.choice(["POST", "POST", "GET", "PUT", "P\0ST"]), rng.choice(["1.1", "1.1", "1.0", "9"])
    head = [f"{method} {path} HTTP/{version}", "Host: x",
            f"Authorization: Bearer {rng.choice([USER, CHIEF[:-1], ''])}", f"Content-Length: {length}", "Connection: close"]
    if rng.random() < .2: head.insert(2, rng.choice(["Transfer-Encoding: chunked", "X" * 9000, "A:\0", " folded: x", "Content-Length: 3"]))
    return "\r\n".join(head).encode("latin1") + b"\r\n\r\n" + body


def test_malformed_requests(caplog):
    "1,000 of them: an answer that is no 200 or a closed connection, no token in it, and a proxy that is as before."
    async def main():
        replica, rng, statuses = Standin(), random.Random(0), {}
        async with Proxy(Members([await replica.start()]), Tokens((USER,), (CHIEF,))) as proxy:
            port = int((await proxy.start()).rpartition(":")[2])
            async def one():
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(malformed(rng))
                try: said = await asyncio.wait_for(reader.read(), 1)
                except TimeoutError: said = b"0 waits"  # its body is shorter than it says
                except ConnectionError: said = b""
                finally: writer.close()
                assert USER.encode() not in said and CHIEF[:-1].encode() not in said
                status = said.split()[1].decode() if said else "closed"
                statuses[status] = statuses.get(status, 0) + 1
            for _ in range(20): await asyncio.gather(*[one() for _ in range(50)])
            await asyncio.sleep(.2)
            assert proxy.inflight == 0 and proxy.members.router.report()[replica.url]["in_flight"] == 0
            assert not replica.paused and not replica.adapters
        await replica.stop()
        return statuses
    statuses = asyncio.run(main())
    assert USER not in caplog.text and CHIEF[:-1] not in caplog.text
    print(statuses)
    assert sum(statuses.values()) == 1000 and not {"200", "500"} & statuses.keys()
    assert statuses["400"] > 200 and statuses.get("waits", 0) < 300


def test_replicas_come_and_go(tmp_path, seconds=10):
    "Whole answers under two versions while replicas are killed and restarted: none is lost, none is of another version."
    async def main():
        rng, replicas = random.Random(1), [Standin(pace=.002) for _ in range(3)]
        urls, lost, wrong, done, kills = [await r.start() for r in replicas], [], [], 0, 0
        async with Proxy(Members(urls, str(tmp_path/"state"), period=.05, patience=5, base="toy"), tries=6) as proxy:
            url, paths = await proxy.start(), {}
            for name in ("v1", "v2"):
                paths[name] = adapter(tmp_path/name)
                await proxy.members.load(name, paths[name])
            end = time.monotonic() + seconds
            async def client(http, k):
                nonlocal done
                while time.monotonic() < end:
                    name, prompt = rng.choice(["v1", "v2"]), [rng.randrange(9)] * 40
                    body = dict(model=name, prompt=prompt, max_tokens=20)
                    async with http.post(url + "/v1/completions", json=body) as r:
                        said = await r.json()
                        if r.status != 200: lost.append(said)
                        elif said["choices"][0]["text"] != answer_text(answer_ids(paths[name], prompt, 0, 20)): wrong.append(said)
                        done += 1
                    await asyncio.sleep(.05)
            async def killer():
                nonlocal kills
                while time.monotonic() < end - 1:
                    r = rng.choice(replicas)
                    await r.stop()
                    kills += 1
                    await asyncio.sleep(rng.choice([0, .2]))
                    await r.restart()
                    await asyncio.sleep(.4)
            async with aiohttp.ClientSession() as http: await asyncio.gather(killer(), *[client(http, k) for k in range(16)])
            assert proxy.inflight == 0
        for r in replicas: await r.stop()
        return lost, wrong, done, kills
    lost, wrong, done, kills = asyncio.run(main())
    print(f"{done} requests, {kills} kills, {len(lost)} lost, {len(wrong)} of another version")
    assert done > 300 and kills > 5 and not wrong and not lost, lost[:3]


async def until(true, seconds=20):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(.01)


class Held(Standin):
    "A replica that holds a load until `go` is set, then does it."
    def _fresh(self):
        super()._fresh()
        self.go, self.asked = asyncio.Event(), asyncio.Event()

    async def _load(self, request):
        self.asked.set()
        await self.go.wait()
        return await super()._load(request)


def test_replica_killed_around_a_load(tmp_path):
    "Before, during and after: a name answers once those that live have it, and whoever comes back gets it before its first request."
    async def main():
        replicas = [Held(), Standin(), Standin()]
        urls = [await r.start() for r in replicas]
        async with Proxy(Members(urls, str(tmp_path/"state"), period=.05, patience=20, base="toy")) as proxy:
            url, m = await proxy.start(), proxy.members
            async def answers(http, name):
                body = dict(model=name, prompt=[1, 2, 3], max_tokens=3)
                async with http.post(url + "/v1/completions", json=body) as r: return r.status, await r.json()
            async with aiohttp.ClientSession() as http:
                for when in ("before", "during", "after"):
                    victim = replicas[0] if when == "during" else replicas[1]
                    if when == "before": await victim.stop()
                    path, counted = adapter(tmp_path/when), victim.served
                    if when != "during": replicas[0].go.set()
                    else: replicas[0].go.clear(), replicas[0].asked.clear()
                    load = asyncio.create_task(m.load(when, path))
                    if when == "during":
                        await asyncio.wait_for(victim.asked.wait(), 20)
                        assert (await answers(http, when))[0] == 404  # not all have confirmed
                        await victim.stop()
                    await load
                    if when == "after": await victim.stop()
                    status, said = await answers(http, when)
                    assert status == 200 and said["choices"][0]["text"] == answer_text(answer_ids(path, [1, 2, 3], 0, 3))
                    assert when in read_state(m.file).adapters
                    await victim.restart()
                    if when == "during": victim.go.set()
                    await until(lambda: all(up.state == "up" for up in m.ups.values()))
                    assert victim.adapters.keys() == m.state.adapters.keys() and victim.served == counted
        for r in replicas: await r.stop()
    asyncio.run(main())


async def program(*args, **env):
    "The proxy as a process, and its address."
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", PROGRAM, "--port", "0", *args, stdout=subprocess.PIPE,
                                                 stderr=subprocess.PIPE, env=os.environ | env, cwd=Path(__file__).parent.parent)
    line = (await asyncio.wait_for(child.stdout.readline(), 60)).decode()
    return child, line.split()[0].rstrip(":")


def test_proxy_killed_in_the_middle_of_a_broadcast(tmp_path):
    "One replica has loaded, the other has not: the proxy that comes back takes the name from both, and the same load then succeeds."
    async def main():
        slow, quick = Held(), Standin()
        urls, path = [await slow.start(), await quick.start()], adapter(tmp_path/"v1")
        args = ["--replica", urls[0], "--replica", urls[1], "--state", str(tmp_path/"state"), "--base", "toy", "--quiet"]
        child, url = await program(*args)
        async with aiohttp.ClientSession() as http:
            load = asyncio.create_task(http.post(url + LOAD, json=dict(lora_name="v1", lora_path=path)))
            await asyncio.wait_for(slow.asked.wait(), 20)
            await until(lambda: quick.adapters)
            child.kill(); await child.wait()
            with pytest.raises(aiohttp.ClientError): await load
            slow.go.set()
            kept = read_state(str(tmp_path/"state"))
            assert (kept.adapters, kept.gone) == ({}, {"v1": path})
            child, url = await program(*args)
            await until(lambda: not quick.adapters and not slow.adapters)
            async with http.post(url + LOAD, json=dict(lora_name="v1", lora_path=path)) as r: assert r.status == 200, await r.text()
            assert quick.adapters == slow.adapters == read_state(str(tmp_path/"state")).adapters == {"v1": path}
        child.terminate()
        assert await child.wait() == 0
        await slow.stop(); await quick.stop()
    asyncio.run(main())


def test_every_door_needs_its_token():
    "Without a token, with a wrong one, with one for generation: nothing of it reaches a replica."
    async def main():
        replica, wrong = Standin(), {}
        async with Proxy(Members([await replica.start()]), Tokens((USER,), (CHIEF,))) as proxy:
            url = await proxy.start()
            replica.calls.clear()
            async with aiohttp.ClientSession() as http:
                for (method, path), route in ROUTES.items():
                    for who in (None, "x" * 32, USER[:-1], USER):
                        headers = {"authorization": f"Bearer {who}"} if who else {}
                        allowed = route.needs == "nothing" or who == USER and route.needs == "generate"
                        async with http.request(method, url + path, headers=headers, json={} if method == "POST" else None) as r:
                            refused = r.status in (401, 403)
                            if refused == allowed: wrong[method, path, who] = r.status
                            assert not who or who not in await r.text()
            assert replica.calls == ["/tokenize", "/detokenize"] and not wrong, wrong  # with the token that may
        await replica.stop()
    asyncio.run(main())


@pytest.mark.skipif(not shutil.which("openssl"), reason="the certificate is made with openssl")
def test_tls(tmp_path):
    "A client that trusts the certificate gets an answer, one that does not gets none; tokens come from files."
    pem, key, token = tmp_path/"cert.pem", tmp_path/"key.pem", tmp_path/"token"
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", pem, "-days", "2", "-subj",
                    "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    token.write_text(USER + "\n")
    async def main():
        replica = Standin()
        child, url = await program("--replica", await replica.start(), "--certificate", str(pem), "--key", str(key), "--quiet",
                                   GRPO_COLAB_TOKEN_FILE=str(token))
        assert url.startswith("https://")
        ask = dict(json=dict(model="toy", prompt=[1]), headers={"authorization": f"Bearer {USER}"})
        async with aiohttp.ClientSession() as http:
            trust = ssl.create_default_context(cafile=pem)
            async with http.post(url + "/v1/completions", ssl=trust, **ask) as r: assert r.status == 200
            async with http.post(url + "/v1/completions", ssl=trust, json=ask["json"]) as r: assert r.status == 401
            with pytest.raises(aiohttp.ClientConnectorCertificateError): await http.post(url + "/v1/completions", **ask)
            with pytest.raises(aiohttp.ClientError): await http.post(url.replace("https", "http") + "/v1/completions", **ask)
        child.terminate()
        assert await child.wait() == 0 and USER.encode() not in await child.stderr.read()
        await replica.stop()
    asyncio.run(main())
