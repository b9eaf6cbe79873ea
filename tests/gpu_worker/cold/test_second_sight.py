"""By default a worker stores what it sees a second time, what goes on elsewhere, and what it has when it leaves."""

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from gpu_worker.settings import WorkerSettings
from mesh.blocks import chain_keys, namespace
from shoal.scheduler.v1 import scheduler_pb2
from shoal.types.v1 import types_pb2

pytestmark = pytest.mark.asyncio(loop_scope="session")

DEFAULT = {"cold_store_after": WorkerSettings.model_fields["cold_store_after"].default}
ONE_TOKEN = types_pb2.SamplingParams(temperature=0, max_tokens=1)


def prompt(seed: int, tokens: int = 200) -> list[int]:
    """Twelve full blocks and eight tokens, like no other seed's."""
    drawn = random.Random(2000 + seed)
    return [drawn.randrange(1, 256) for _ in range(tokens)]


def keys_of(rig: Any, ids: list[int]) -> list[bytes]:
    info = rig.bridge.info
    return chain_keys(namespace(info.model_digest, info.tokenizer_digest, "", b""), ids)


def held(pair: Any, rig: Any, ids: list[int]) -> list[bool]:
    """Of each block of `ids`, whether the cache has it."""
    return [pair.cache.holds([key], rig.bridge.info.kv_dtype) for key in keys_of(rig, ids)]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def picky(workers: Any, ready: Any) -> AsyncIterator[Any]:
    """A worker that stores by the default."""
    async with workers.own_worker(worker_id="picky", **DEFAULT) as rig:
        yield await ready(rig)


async def test_a_prompt_that_comes_once_is_not_stored_and_one_that_is_asked_twice_is(
    pair: Any, picky: Any, ask: Any, eventually: Any
) -> None:
    once, twice = prompt(1), prompt(2)
    before = picky.sample("cold_blocks_total", what="held")
    await ask(picky, prompt_ids=once)
    first = await ask(picky, prompt_ids=twice)
    assert picky.sample("cold_blocks_total", what="held") >= before + 24
    again = await ask(picky, prompt_ids=twice)
    assert again.ids == first.ids
    await eventually(lambda: all(held(pair, picky, twice)))
    assert not any(held(pair, picky, once))
    other = await ask(pair.second, prompt_ids=twice)
    assert (other.ids, other.cached) == (first.ids, {types_pb2.KV_TIER_SHARED: 192})


async def test_prompts_with_the_same_beginning_store_that_and_not_their_ends(
    pair: Any, picky: Any, ask: Any, eventually: Any
) -> None:
    beginning, ends = prompt(3, 96), [prompt(4, 100), prompt(5, 100)]
    for end in ends:
        await ask(picky, prompt_ids=beginning + end)
    await eventually(lambda: all(held(pair, picky, beginning)))
    twice = prompt(6)
    for _ in range(2):  # and once this is there, all that was queued before it is
        await ask(picky, prompt_ids=twice)
    await eventually(lambda: all(held(pair, picky, twice)))
    for end in ends:
        assert held(pair, picky, beginning + end) == [True] * 6 + [False] * 6


async def test_a_prompt_that_is_known_and_asked_again_is_stored_once(
    pair: Any, picky: Any, ask: Any, eventually: Any
) -> None:
    ids = prompt(7)
    before = picky.sample("cold_blocks_total", what="stored")
    for _ in range(2):
        await ask(picky, prompt_ids=ids, sampling=ONE_TOKEN)
    await asyncio.gather(*[ask(picky, prompt_ids=ids, sampling=ONE_TOKEN) for _ in range(4)])
    last = prompt(8)
    for _ in range(2):
        await ask(picky, prompt_ids=last, sampling=ONE_TOKEN)
    await eventually(lambda: picky.sample("cold_blocks_total", what="stored") >= before + 24)
    assert picky.sample("cold_blocks_total", what="stored") == before + 24


async def test_a_parked_answer_is_stored_at_its_first_sight(pair: Any, picky: Any, ask: Any, eventually: Any) -> None:
    ids = prompt(9)
    sampling = types_pb2.SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True)
    steps = picky.bridge.load.steps
    pending = asyncio.ensure_future(ask(picky, prompt_ids=ids, sampling=sampling, request_id="moves"))
    await eventually(lambda: picky.bridge.load.steps > steps + 40)
    order = scheduler_pb2.Stop(request_id="moves", attempt=1, reason="moved by a test")
    picky.scheduler.orders.put_nowait(scheduler_pb2.WorkerOrder(stop=order))
    told = await pending
    assert told.reason == types_pb2.FINISH_REASON_PARKED
    known = ids + told.ids[:-1]  # the last token's KV is not computed yet
    assert len(keys_of(picky, known)) > 12
    await eventually(lambda: all(held(pair, picky, known)))


async def test_a_worker_that_leaves_stores_what_it_held_back(pair: Any, ask: Any, ready: Any) -> None:
    ids = prompt(10, 400)
    async with pair.own_worker(worker_id="leaves", **DEFAULT) as rig:
        await ready(rig)
        await ask(rig, prompt_ids=ids, sampling=ONE_TOKEN)
        assert not any(held(pair, rig, ids))
    assert all(held(pair, rig, ids))


async def test_what_is_computed_again_because_the_device_lost_it_is_stored(
    pair: Any, ask: Any, eventually: Any, ready: Any
) -> None:
    ids, others = prompt(12), [prompt(seed) for seed in range(20, 26)]
    small = {"kv_bytes": "256KiB", "context_tokens": 256}
    async with pair.own_worker(worker_id="small", **small, **DEFAULT) as rig:
        await ready(rig)
        assert rig.bridge.info.total_blocks < 6 * 12
        for one in (ids, *others):
            await ask(rig, prompt_ids=one, sampling=ONE_TOKEN)
        assert not any(held(pair, rig, ids))
        assert (await ask(rig, prompt_ids=ids, sampling=ONE_TOKEN)).cached == {}
        await eventually(lambda: all(held(pair, rig, ids)))
        assert not any(any(held(pair, rig, one)) for one in others)


async def test_one_sight_is_enough_where_the_setting_says_so(pair: Any, ask: Any, eventually: Any) -> None:
    ids = prompt(11)
    await ask(pair.first, prompt_ids=ids, sampling=ONE_TOKEN)
    await eventually(lambda: all(held(pair, pair.first, ids)))
