"""One worker starts from what another computed, says so, and shares it with nobody who should not have it."""

import asyncio
import random
from typing import Any

import grpc
import pytest

from mesh.blocks import chain_keys, namespace
from shoal.scheduler.v1 import scheduler_pb2
from shoal.types.v1 import types_pb2
from shoal.worker.v1 import worker_pb2

pytestmark = pytest.mark.asyncio(loop_scope="session")

DEVICE, SHARED = types_pb2.KV_TIER_DEVICE, types_pb2.KV_TIER_SHARED


def prompt(seed: int, tokens: int = 200) -> list[int]:
    """Twelve full blocks and eight tokens, like no other seed's."""
    drawn = random.Random(seed)
    return [drawn.randrange(1, 256) for _ in range(tokens)]


def keys_of(rig: Any, ids: list[int], salt: bytes = b"") -> list[bytes]:
    info = rig.bridge.info
    return chain_keys(namespace(info.model_digest, info.tokenizer_digest, "", salt), ids)


def holds(pair: Any, rig: Any, keys: list[bytes]) -> bool:
    """Whether the cache holds what `rig` would look up."""
    return pair.cache.holds(keys, rig.bridge.info.kv_dtype)


async def stored(pair: Any, ids: list[int], ask: Any, eventually: Any, **fields: Any) -> Any:
    """The first worker's answer, whose prompt the cache holds then."""
    told = await ask(pair.first, prompt_ids=ids, **fields)
    keys = keys_of(pair.first, ids, fields.get("cache_salt", b""))
    await eventually(lambda: holds(pair, pair.first, keys))
    return told


async def test_a_second_worker_starts_from_the_firsts_blocks_and_says_so(pair: Any, ask: Any, eventually: Any) -> None:
    ids = prompt(1)
    first = await stored(pair, ids, ask, eventually)
    assert first.cached == {}
    hits, tokens = pair.second.sample("cold_lookups_total", outcome="hit"), 192
    second = await ask(pair.second, prompt_ids=ids)
    assert second.cached == {SHARED: tokens}
    assert second.ids == first.ids
    assert pair.second.sample("cold_lookups_total", outcome="hit") == hits + 1
    assert pair.second.sample("cached_tokens_total", tier="shared") >= tokens
    again = await ask(pair.second, prompt_ids=ids)
    assert again.cached == {DEVICE: len(ids) - 1}
    assert again.ids == first.ids


async def test_what_was_fetched_is_not_stored_again(pair: Any, ask: Any, eventually: Any) -> None:
    ids = prompt(2)
    await stored(pair, ids, ask, eventually)
    before = pair.second.sample("cold_blocks_total", what="stored")
    await ask(pair.second, prompt_ids=ids)
    longer = ids + prompt(3, 40)
    await ask(pair.second, prompt_ids=longer)
    await eventually(lambda: holds(pair, pair.second, keys_of(pair.second, longer)))
    # The blocks after the fetched ones: of the longer prompt, and of what either answer filled.
    assert pair.second.sample("cold_blocks_total", what="stored") - before <= 5


async def test_only_what_the_device_lacks_is_fetched(pair: Any, ask: Any, eventually: Any) -> None:
    ids = prompt(4)
    await ask(pair.second, prompt_ids=ids[:100])
    await stored(pair, ids, ask, eventually)
    pair.cache.sent.clear()
    told = await ask(pair.second, prompt_ids=ids)
    assert told.cached == {DEVICE: 96, SHARED: 96}
    assert pair.cache.sent == keys_of(pair.second, ids)[6:]


async def test_a_moved_answers_output_is_fetched_too(pair: Any, ask: Any, eventually: Any) -> None:
    ids = prompt(5, 64)
    drawn = types_pb2.SamplingParams(temperature=1, seed=3, max_tokens=60)
    whole = await ask(pair.first, prompt_ids=ids, sampling=drawn)
    known = ids + whole.ids[:48]
    await eventually(lambda: holds(pair, pair.first, keys_of(pair.first, known)))
    pair.cache.sent.clear()
    choices = [worker_pb2.Choice(index=0, emitted_ids=whole.ids[:49])]
    moved = await ask(pair.second, prompt_ids=ids, sampling=drawn, choices=choices, attempt=2)
    assert whole.ids[:49] + moved.ids == whole.ids
    assert pair.cache.sent == keys_of(pair.second, known)
    assert moved.cached == {SHARED: 64}


async def test_tenants_never_share_in_the_shared_tier_either(pair: Any, ask: Any, eventually: Any) -> None:
    ids = prompt(6)
    await stored(pair, ids, ask, eventually, cache_salt=b"a")
    pair.cache.sent.clear()
    stranger = await ask(pair.second, prompt_ids=ids, cache_salt=b"b")
    assert (stranger.cached, pair.cache.sent) == ({}, [])
    friend = await ask(pair.second, prompt_ids=ids, cache_salt=b"a")
    assert friend.cached == {SHARED: 192}


async def test_two_requests_for_the_same_blocks_fetch_them_once(pair: Any, ask: Any, eventually: Any) -> None:
    ids = prompt(7)
    alone = await stored(pair, ids, ask, eventually)
    pair.cache.sent.clear()
    pair.cache.open.clear()
    both = [asyncio.ensure_future(ask(pair.second, prompt_ids=ids)) for _ in range(2)]
    await eventually(lambda: pair.cache.sent)
    pair.cache.open.set()
    told = [await one for one in both]
    assert [one.ids for one in told] == [alone.ids] * 2
    assert [one.cached for one in told] == [{SHARED: 192}] * 2
    assert pair.cache.sent == keys_of(pair.second, ids)


async def test_a_request_that_waits_for_blocks_says_that_it_fetches(pair: Any, ask: Any, eventually: Any) -> None:
    ids = prompt(8)
    await stored(pair, ids, ask, eventually)
    pair.cache.open.clear()
    pending = asyncio.ensure_future(ask(pair.second, prompt_ids=ids))
    await eventually(lambda: pair.second.bridge.running())
    assert await pair.second.is_serving()
    asyncio.get_running_loop().call_later(0.5, pair.cache.open.set)
    told = await pending
    assert worker_pb2.PHASE_FETCHING in told.phases
    assert told.cached == {SHARED: 192}
    assert told.usage.queue_ms >= 400  # from the call on, the fetch included


async def test_a_client_that_is_gone_while_its_blocks_come_frees_all(pair: Any, ask: Any, eventually: Any) -> None:
    ids = prompt(9)
    await stored(pair, ids, ask, eventually)
    pair.cache.open.clear()
    pair.cache.sent.clear()
    pending = asyncio.ensure_future(ask(pair.second, prompt_ids=ids))
    await eventually(lambda: pair.cache.sent)
    pending.cancel()
    await eventually(lambda: pair.second.idle and not pair.cache.gets, timeout_s=1)
    pair.cache.open.set()
    assert (await ask(pair.second, prompt_ids=ids)).cached.get(SHARED, 0) >= 176


async def test_a_request_parked_while_its_blocks_come_ends_at_once(pair: Any, ask: Any, eventually: Any) -> None:
    ids = prompt(10)
    await stored(pair, ids, ask, eventually)
    pair.cache.open.clear()
    pair.cache.sent.clear()
    pending = asyncio.ensure_future(ask(pair.second, prompt_ids=ids, request_id="parked-early"))
    await eventually(lambda: pair.cache.sent)
    order = scheduler_pb2.Stop(request_id="parked-early", attempt=1, reason="moved by a test")
    pair.second.scheduler.orders.put_nowait(scheduler_pb2.WorkerOrder(stop=order))
    told = await pending
    assert told.reason == types_pb2.FINISH_REASON_PARKED
    assert told.ids == []


async def test_a_newer_attempt_ends_one_whose_blocks_come(pair: Any, ask: Any, eventually: Any) -> None:
    ids = prompt(11)
    alone = await stored(pair, ids, ask, eventually)
    pair.cache.open.clear()
    pair.cache.sent.clear()
    older = asyncio.ensure_future(ask(pair.second, prompt_ids=ids, request_id="again"))
    await eventually(lambda: pair.cache.sent)
    newer = asyncio.ensure_future(ask(pair.second, prompt_ids=ids, request_id="again", attempt=2))
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await older
    assert ended.value.code() is grpc.StatusCode.ABORTED
    pair.cache.open.set()
    assert (await newer).ids == alone.ids


async def test_another_precision_misses_and_a_worker_that_leaves_stores_what_it_has(
    pair: Any, ask: Any, eventually: Any, ready: Any
) -> None:
    ids, last = prompt(12), prompt(13, 400)
    await stored(pair, ids, ask, eventually)
    pair.cache.sent.clear()
    async with pair.own_worker(worker_id="third", precision="bf16") as third:
        await ready(third)
        told = await ask(third, prompt_ids=ids)
        assert (told.cached, pair.cache.sent) == ({}, [])
        await ask(third, prompt_ids=last, sampling=types_pb2.SamplingParams(temperature=0, max_tokens=1))
        keys, kv_dtype = keys_of(third, last), third.bridge.info.kv_dtype
    assert kv_dtype != pair.first.bridge.info.kv_dtype
    assert pair.cache.holds(keys, kv_dtype)


async def test_short_prompts_are_not_looked_up(pair: Any, ask: Any) -> None:
    before = pair.second.sample("cold_calls_total", call="match", outcome="miss")
    await ask(pair.second, prompt_ids=prompt(14, 60))
    assert pair.second.sample("cold_calls_total", call="match", outcome="miss") == before


async def test_a_simulated_worker_takes_no_part(pair: Any, ask: Any, ready: Any) -> None:
    ids = prompt(15)
    async with pair.own_worker(worker_id="simulated", kind="simulated") as simulated:
        await ready(simulated)
        told = await ask(simulated, prompt_ids=ids)
        await ask(simulated, prompt_ids=ids)
        assert (len(told.ids), told.cached) == (16, {})
        assert sum(simulated.sample("cold_blocks_total", what=what) for what in ("stored", "dropped", "fetched")) == 0
        keys = tuple(keys_of(simulated, ids))
    assert not any(key.startswith(keys) for key in pair.cache.held)
