"""Fault B17: whatever the cache service does, a request costs one small budget, running streams keep their pace, the
answer is the same, a counter tells, and it heals by itself."""

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio

from shoal.types.v1 import types_pb2

pytestmark = pytest.mark.asyncio(loop_scope="session")

SHARED = types_pb2.KV_TIER_SHARED
# Trouble shorter than this says nothing of a stream's pace.
LONG_S = 0.25
# The budget is 1 s; the rest is for a machine that is shared.
FIRST_S = 2.2


def prompt(seed: int, tokens: int = 200) -> list[int]:
    drawn = random.Random(1000 + seed)
    return [drawn.randrange(1, 256) for _ in range(tokens)]


class Stage:
    """A worker, and the port on which its cache service stands, falls and is another."""

    def __init__(self, rig: Any, source: Any, port: int) -> None:
        self.rig = rig
        self.source = source  # a pair of workers whose cache holds what the first computed
        self.port = port

    def lookups(self, outcome: str) -> float:
        return self.rig.sample("cold_lookups_total", outcome=outcome)

    def calls(self, call: str, outcome: str) -> float:
        return self.rig.sample("cold_calls_total", call=call, outcome=outcome)


@contextlib.asynccontextmanager
async def silent(port: int) -> AsyncIterator[None]:
    """Accepts connections and says nothing."""
    over = asyncio.Event()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await over.wait()
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", port)
    async with server:
        yield
        over.set()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stage(workers: Any, ready: Any) -> AsyncIterator[Stage]:
    """Nothing listens at first: the service was absent when the worker started."""
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    budgets = {"cold_match_ms": 1000, "cold_stall_ms": 1000, "cold_queue_blocks": 24}
    async with workers.own_worker(worker_id="staged", caches=f"127.0.0.1:{port}", **budgets) as rig:
        yield Stage(await ready(rig), workers, port)


@pytest.fixture
async def held(stage: Stage, pair: Any, ask: Any, eventually: Any) -> Callable[[int], Any]:
    """`await held(seed)`: a prompt whose blocks the cache holds, and its answer."""

    async def store(seed: int) -> tuple[list[int], list[int]]:
        before = len(pair.cache.held)
        told = await ask(pair.first, prompt_ids=prompt(seed))
        await eventually(lambda: len(pair.cache.held) >= before + 12)
        return prompt(seed), told.ids

    return store


@contextlib.asynccontextmanager
async def a_running_stream(stage: Stage, ask: Any, eventually: Any) -> AsyncIterator[None]:
    """Around trouble: a stream that must not notice."""
    steps = stage.rig.bridge.load.steps
    sampling = types_pb2.SamplingParams(temperature=0, max_tokens=1500)
    stream = asyncio.ensure_future(ask(stage.rig, prompt_ids=prompt(99, 30), sampling=sampling))
    await eventually(lambda: stage.rig.bridge.load.steps > steps + 5)
    began = asyncio.get_running_loop().time()
    yield
    ended = asyncio.get_running_loop().time()
    told = await stream
    assert len(told.ids) == 1500
    if ended - began > LONG_S and told.came_at[-1] > ended:
        assert told.tokens_per_s(began, ended) > told.tokens_per_s() / 3


async def test_a_service_that_is_absent_at_the_start_costs_nothing(
    stage: Stage, held: Any, ask: Any, eventually: Any
) -> None:
    ids, alone = await held(1)
    away = stage.lookups("away")
    async with a_running_stream(stage, ask, eventually):
        told = await ask(stage.rig, prompt_ids=ids)
    assert (told.ids, told.cached) == (alone, {})
    assert told.first_s < FIRST_S
    assert stage.lookups("away") == away + 1


async def test_what_cannot_be_stored_waits_in_a_bounded_queue(stage: Stage, ask: Any) -> None:
    before = stage.rig.sample("cold_blocks_total", what="dropped")
    for seed in (3, 4):
        await ask(stage.rig, prompt_ids=prompt(seed))
    assert stage.rig.sample("cold_blocks_total", what="dropped") - before >= 2  # 13 blocks each, and 24 fit
    assert stage.rig.sample("cold_blocks_total", what="stored") == 0


async def test_it_is_used_as_soon_as_it_is_there_and_what_waited_is_stored(
    stage: Stage, held: Any, ask: Any, eventually: Any, listening: Any
) -> None:
    ids, alone = await held(2)
    async with listening(stage.source.cache, stage.port):
        await eventually(lambda: stage.rig.sample("cold_blocks_total", what="stored") >= 12, timeout_s=20)
        told = await ask(stage.rig, prompt_ids=ids)
        assert (told.ids, told.cached) == (alone, {SHARED: 192})


async def a_hit(stage: Stage, held: Any, ask: Any, eventually: Any, seed: int) -> None:
    """It heals unaided: soon some new prompt is found."""
    seeds = itertools.count(seed * 1000)

    async def found() -> bool:
        ids, alone = await held(next(seeds))
        told = await ask(stage.rig, prompt_ids=ids)
        assert told.ids == alone
        return bool(told.cached)

    await eventually(found, timeout_s=25, every_s=0.2)


async def test_a_service_that_is_silent_costs_one_budget_and_then_nothing(
    stage: Stage, held: Any, ask: Any, eventually: Any, listening: Any
) -> None:
    ids, alone = await held(5)
    more, _ = await held(6)
    async with listening(stage.source.cache, stage.port):
        await a_hit(stage, held, ask, eventually, 7)
    async with silent(stage.port), a_running_stream(stage, ask, eventually):
        told = await ask(stage.rig, prompt_ids=ids)
        assert (told.ids, told.cached) == (alone, {})
        assert told.first_s < FIRST_S
        away = stage.lookups("away")
        assert (await ask(stage.rig, prompt_ids=more)).first_s < FIRST_S
        assert stage.lookups("away") == away + 1
    async with listening(stage.source.cache, stage.port):
        await a_hit(stage, held, ask, eventually, 8)


async def test_a_service_that_is_thirty_seconds_late_costs_one_budget(
    stage: Stage, held: Any, ask: Any, eventually: Any, listening: Any
) -> None:
    ids, alone = await held(9)
    cache = stage.source.cache
    async with listening(cache, stage.port):
        await a_hit(stage, held, ask, eventually, 10)
        before = stage.calls("match", "silent")
        cache.late_s = 30.0
        async with a_running_stream(stage, ask, eventually):
            told = await ask(stage.rig, prompt_ids=ids)
        assert (told.ids, told.cached) == (alone, {})
        assert told.first_s < FIRST_S
        assert stage.calls("match", "silent") == before + 1
        cache.late_s = 0.0
        await a_hit(stage, held, ask, eventually, 11)


async def test_what_came_before_a_service_died_is_used(
    stage: Stage, held: Any, ask: Any, eventually: Any, listening: Any
) -> None:
    ids, alone = await held(12)
    cache = stage.source.cache
    async with listening(cache, stage.port):
        await a_hit(stage, held, ask, eventually, 13)
        before = stage.lookups("partial")
        cache.dies_after = 5
        async with a_running_stream(stage, ask, eventually):
            told = await ask(stage.rig, prompt_ids=ids)
        assert (told.ids, told.cached) == (alone, {SHARED: 80})
        assert stage.lookups("partial") == before + 1
        cache.behave()
        await a_hit(stage, held, ask, eventually, 14)


async def test_a_service_that_stops_in_the_middle_is_left_after_the_stall(
    stage: Stage, held: Any, ask: Any, eventually: Any, listening: Any
) -> None:
    ids, alone = await held(15)
    cache = stage.source.cache
    async with listening(cache, stage.port):
        await a_hit(stage, held, ask, eventually, 16)
        before = stage.calls("fetch", "silent")
        cache.open.clear()
        async with a_running_stream(stage, ask, eventually):
            told = await ask(stage.rig, prompt_ids=ids)
        assert (told.ids, told.cached) == (alone, {SHARED: 16})
        assert told.first_s < FIRST_S + 1.0
        assert stage.calls("fetch", "silent") == before + 1
        cache.behave()
        await a_hit(stage, held, ask, eventually, 17)


async def test_damaged_blocks_are_a_miss(stage: Stage, held: Any, ask: Any, eventually: Any, listening: Any) -> None:
    ids, alone = await held(18)
    cache = stage.source.cache
    async with listening(cache, stage.port):
        await a_hit(stage, held, ask, eventually, 19)
        before = stage.calls("fetch", "mismatch")
        cache.flips_a_bit = True
        told = await ask(stage.rig, prompt_ids=ids)
        assert (told.ids, told.cached) == (alone, {})
        assert stage.calls("fetch", "mismatch") == before + 1
