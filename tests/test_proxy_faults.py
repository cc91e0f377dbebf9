"""The proxy under malformed requests, and under load with replicas that are killed and restarted."""
import asyncio
import json
import random
import time
from pathlib import Path

import aiohttp

from grpo_colab.guard import Tokens
from grpo_colab.members import Members
from grpo_colab.prefix_proxy import Proxy
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
