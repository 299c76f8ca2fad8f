"""Many clients on one small buffer: the real server process, the real client, the demo model, and every answer as it is alone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import openai
import psutil
import pytest

from onekv import Engine, cache_for, load_model
from onekv.server import top
from serving import demo_server

CLIENTS = 64
LEAVING = 16


@dataclass
class Asked:
    """A request of one client, and what came of it."""

    prompt: str
    max_tokens: int
    streams: bool
    leaves_after: float | None  # seconds
    text: str | None = None  # None: not completed


@pytest.fixture
def url() -> Iterator[str]:
    with demo_server(240) as address:
        yield address


def asked(rng: random.Random, count: int, leaving: int) -> list[Asked]:
    words = ["river", "stone", "lamp", "winter", "paper", "green", "cloud", "seven", "music", "window", "bread", "north"]
    stems = [" ".join(rng.choices(words, k=8)) for _ in range(6)]
    made = []
    for i in range(count):
        own = " ".join(rng.choices(words, k=rng.randrange(2, 8)))
        leaves = rng.uniform(0.05, 3) if i < leaving else None
        made.append(Asked(f"{rng.choice(stems)}\n{own}", rng.randrange(4, 18), rng.random() < 0.5, leaves))
    rng.shuffle(made)
    return made


async def ask(client: openai.AsyncOpenAI, one: Asked, wait: float) -> None:
    await asyncio.sleep(wait)

    async def answer() -> str:
        fields = {"model": "smollm2", "prompt": one.prompt, "max_tokens": one.max_tokens, "temperature": 0}
        if not one.streams:
            return (await client.completions.create(**fields)).choices[0].text
        stream = await client.completions.create(**fields, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    try:
        one.text = await asyncio.wait_for(answer(), one.leaves_after)
    except TimeoutError:
        assert one.leaves_after is not None


async def all_at_once(url: str, requests: list[Asked], rng: random.Random) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        await asyncio.gather(*(ask(client, one, rng.uniform(0, 2)) for one in requests))


def settled(url: str) -> dict[str, int]:
    """Wait until the server has noticed who has left."""
    for _ in range(200):
        health: dict[str, int] = httpx.get(f"{url}/health").json()
        if health["running"] == health["waiting"] == 0:
            return health
        asyncio.run(asyncio.sleep(0.05))
    raise AssertionError(health)


@pytest.mark.demo_model
def test_answers_under_load_equal_each_alone_and_no_cell_is_lost(url: str) -> None:
    rng = random.Random(4)
    requests = asked(rng, CLIENTS, LEAVING)
    asyncio.run(all_at_once(url, requests, rng))
    health = settled(url)
    memory = psutil.Process(next(c.pid for c in psutil.Process().children() if "serve" in c.cmdline())).memory_info
    before = memory().rss
    again = asked(rng, CLIENTS // 4, 0)
    asyncio.run(all_at_once(url, again, rng))
    health = settled(url)
    assert memory().rss - before < 40e6

    counts = top.read(url)
    for name in ("num_preemptions", "num_evictions", "prefix_cache_hits"):
        assert counts[f"{name}_total"] > 0, name
    left = [one for one in requests if one.text is None]
    assert 0 < len(left) <= LEAVING

    assert health["used_cells"] == health["evictable_cells"]
    assert health["used_cells"] + health["free_cells"] == health["num_cells"] == 240
    cells = httpx.get(f"{url}/v1/cells").json()
    assert len(cells["cells"]) == health["used_cells"]
    assert {owner["kind"] for owner in cells["owners"].values()} == {"prefix"}

    model = load_model("smollm2", weights="float32", deterministic=True)
    total = 0
    with Engine(model, cache_for(model, 256), max_running=1) as engine:
        for i, one in enumerate([*requests, *again]):
            result = engine.generate(one.prompt, max_tokens=one.max_tokens, key=(("alone", str(i)),))
            total += result.usage.prompt_tokens + result.usage.completion_tokens
            if one.text is not None:
                assert result.usage.cached_tokens == 0
                assert one.text == result.choices[0].text
    assert total > 3 * 240  # the buffer holds a third of them
