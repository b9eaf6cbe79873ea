"""A worker's view of a cold cache in trouble: whatever the service does is a miss, within a budget, and told."""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from mesh.breaker import BreakerPolicy
from mesh.errors import InvalidRequest, Overloaded, Unavailable
from mesh.kv import Bundle
from mesh.kv_wire import pieces_of
from shoal.cache.v1 import cache_pb2 as pb

from .conftest import HASTY, LARGE, PATIENT, QUICK, bundles, endless, keys_of, played, using


async def test_a_service_that_falls_silent_costs_one_budget_and_heals_alone(peer, eventually) -> None:
    sent = bundles(2)
    peer.held = {bundle.key: bundle for bundle in sent}
    peer.match = lambda request: endless()
    peer.stats = None
    async with using(peer.address, HASTY, QUICK) as client:
        peer.stats = endless
        began = time.monotonic()
        assert await client.caches.match(keys_of(sent)) == 0
        assert 0.2 < time.monotonic() - began < 2
        began = time.monotonic()
        for _ in range(50):
            assert await client.caches.match(keys_of(sent)) == 0
            assert await client.fetched(keys_of(sent)) == []
        assert time.monotonic() - began < 0.2
        assert Counter(client.told) == {("match", "silent"): 1, ("match", "open"): 50, ("fetch", "open"): 50}
        peer.match = peer.stats = None
        await eventually(lambda: client.caches.available)
        assert await client.fetched(keys_of(sent)) == sent


async def test_silence_in_mid_transfer_ends_a_fetch_with_what_came(peer, eventually) -> None:
    sent = bundles(4)

    async def stalls(request: pb.GetRequest, context: Any) -> AsyncIterator[pb.Chunk]:
        for bundle in sent[:2]:
            for piece in pieces_of(bundle):
                yield piece
        await endless()

    peer.get = stalls
    async with using(peer.address, HASTY) as client:
        async with asyncio.timeout(5):
            assert await client.fetched(keys_of(sent)) == sent[:2]
        assert client.told == [("fetch", "silent")]
        assert not client.caches.available
    await eventually(lambda: not peer.running)


async def test_death_in_mid_transfer_ends_a_fetch_with_what_came() -> None:
    sent = bundles(40, LARGE)
    async with played() as (peer, address, server):
        peer.held = {bundle.key: bundle for bundle in sent}
        async with using(address) as client:
            found = []
            async for bundle in client.caches.fetch(keys_of(sent)):
                found.append(bundle)
                if len(found) == 2:
                    await server.drain(0)
            assert 2 <= len(found) < 40
            assert found == sent[: len(found)]
            assert client.told == [("fetch", "died")]
            assert await client.caches.store(sent[:1]) == 0


@pytest.mark.parametrize("error", [Overloaded("no room"), InvalidRequest("no", field="keys")])
async def test_refusals_are_misses_and_several_in_a_row_leave_the_service_alone(peer, error) -> None:
    async def refuse(*_: object) -> Any:
        raise error

    async def refuse_get(request: pb.GetRequest, context: Any) -> AsyncIterator[pb.Chunk]:
        raise error
        yield pb.Chunk()

    peer.match, peer.get, peer.put = refuse, refuse_get, refuse
    async with using(peer.address) as client:
        assert await client.caches.match(keys_of(bundles(1))) == 0
        assert await client.fetched(keys_of(bundles(1))) == []
        assert await client.caches.store(bundles(1)) == 0
        assert client.told == [("match", "refused"), ("fetch", "refused"), ("store", "refused")]
        for _ in range(2):
            assert client.caches.available
            await client.caches.match(keys_of(bundles(1)))
        assert not client.caches.available


async def test_a_replica_that_shuts_down_is_left_at_once(peer) -> None:
    async def draining(request: pb.MatchRequest) -> pb.MatchReply:
        raise Unavailable("shutting down", code="draining", retry_after_s=1)

    peer.match = draining
    async with using(peer.address) as client:
        assert await client.caches.match(keys_of(bundles(1))) == 0
        assert not client.caches.available
    assert client.told == [("match", "unreachable")]


async def test_what_answers_probes_and_fails_at_its_work_is_left_alone_ever_longer(peer, eventually) -> None:
    peer.match = lambda request: endless()
    slow = BreakerPolicy(open_s=0.05, open_most_s=60)
    async with using(peer.address, replace(HASTY, match_s=0.05), slow) as client:
        waits = []
        for _ in range(3):
            began = time.monotonic()
            await client.caches.match(keys_of(bundles(1)))
            await eventually(lambda: client.caches.available)
            waits.append(time.monotonic() - began)
        assert waits[2] > 0.2  # 0.05, 0.1, 0.2 and the call itself
    assert client.told == [("match", "silent")] * 3


async def test_a_service_that_does_not_read_makes_a_store_hold_little_and_end_in_time(peer) -> None:
    asked = 0

    async def source() -> AsyncIterator[Bundle]:
        nonlocal asked
        for bundle in itertools.cycle(bundles(2, LARGE)):
            asked += 1
            yield bundle

    peer.put = lambda chunks: endless()
    async with using(peer.address, HASTY) as client:
        async with asyncio.timeout(5):
            assert await client.caches.store(source()) == 0
        assert client.told == [("store", "silent")]
        assert not client.caches.available
    assert asked < 12  # 4 MiB each: what fits into the transport's windows


async def test_a_store_or_fetch_whose_whole_time_is_over_blames_nobody(peer, eventually) -> None:
    async def slow_source() -> AsyncIterator[Bundle]:
        for bundle in bundles(9):
            yield bundle
            await asyncio.sleep(0.1)

    sent = bundles(20, LARGE)
    async with using(peer.address, replace(PATIENT, fetch_s=0.3, store_s=0.3)) as client:
        assert await client.caches.store(slow_source()) == 0
        peer.held = {bundle.key: bundle for bundle in sent}
        found = []
        async for bundle in client.caches.fetch(keys_of(sent)):
            found.append(bundle)
            await asyncio.sleep(0.1)
        assert found == sent[: len(found)]
        assert client.told == [("store", "late"), ("fetch", "late")]
        assert client.caches.available


async def test_a_call_that_outlives_its_replicas_channel_is_a_miss_and_no_cancel(peer, monkeypatch, eventually) -> None:
    monkeypatch.setattr("mesh.clients.cache.GOODBYE_S", 0.05)
    peer.match = lambda request: endless()
    async with using(peer.address) as client:
        asking = asyncio.create_task(client.caches.match(keys_of(bundles(1))))
        await eventually(lambda: peer.running)
    assert await asking == 0
    assert client.told == [("match", "unreachable")]
