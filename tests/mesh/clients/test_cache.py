"""A worker's view of the cold cache: what it finds and stores, and what it costs where there is none."""

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from mesh.errors import InvalidRequest
from mesh.kv import Bundle
from mesh.kv_wire import key_set_message
from shoal.cache.v1 import cache_pb2 as pb

from .conftest import GEOMETRY, HASTY, LARGE, QUICK, bundles, endless, keys_of, played, until, using


@pytest.mark.parametrize("geometry", [GEOMETRY, LARGE])
async def test_what_one_worker_stores_another_matches_and_fetches(peer, geometry) -> None:
    sent = bundles(4, geometry)
    async with using(peer.address) as first, using(peer.address) as second:
        assert await first.caches.store(sent) == 4
        assert await second.caches.match(keys_of(sent)) == 4
        assert await second.fetched(keys_of(sent)) == sent
    assert first.told == [("store", "ok")]
    assert second.told == [("match", "ok"), ("fetch", "ok")]


async def test_bundles_may_come_one_by_one(peer) -> None:
    sent = bundles(3)

    async def source() -> AsyncIterator[Bundle]:
        for bundle in sent:
            yield bundle

    async with using(peer.address) as client:
        assert await client.caches.store(source()) == 3
    assert list(peer.held.values()) == sent


async def test_a_fetch_ends_at_the_first_miss(peer) -> None:
    sent = bundles(5)
    peer.held = {bundle.key: bundle for bundle in (*sent[:2], *sent[3:])}
    async with using(peer.address) as client:
        assert await client.caches.match(keys_of(sent)) == 2
        assert await client.fetched(keys_of(sent)) == sent[:2]
    assert client.told == [("match", "miss"), ("fetch", "miss")]


async def test_without_a_target_nothing_is_asked() -> None:
    async with using("", ready=False) as client:
        assert await client.caches.match(keys_of(bundles(1))) == 0
        assert await client.fetched(keys_of(bundles(1))) == []
        assert await client.caches.store(bundles(1)) == 0
        assert not client.caches.available
    assert client.told == [("match", "off"), ("fetch", "off"), ("store", "off")]


async def test_an_absent_service_costs_nothing_and_is_found_when_it_comes(unused_port, eventually) -> None:
    sent = bundles(2)
    async with using(f"127.0.0.1:{unused_port}", HASTY, QUICK, ready=False) as client:
        began = time.monotonic()
        assert await client.caches.match(keys_of(sent)) == 0
        assert await client.fetched(keys_of(sent)) == []
        assert await client.caches.store(sent) == 0
        assert time.monotonic() - began < 0.2
        assert client.told == [("match", "open"), ("fetch", "open"), ("store", "open")]
        async with played(unused_port):
            await eventually(lambda: client.caches.available)
            assert await client.caches.store(sent) == 2


@pytest.fixture
async def unused_port() -> int:
    async with await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0) as server:
        return server.sockets[0].getsockname()[1]


async def test_a_port_that_accepts_and_says_nothing_costs_nothing() -> None:
    async with await asyncio.start_server(lambda r, w: endless(), "127.0.0.1", 0) as silent:
        port = silent.sockets[0].getsockname()[1]
        async with using(f"127.0.0.1:{port}", HASTY, QUICK, ready=False) as client:
            for _ in range(5):
                assert await client.caches.match(keys_of(bundles(1))) == 0
    assert set(client.told) == {("match", "open")}


async def test_leaving_a_fetch_early_is_a_cancel_on_the_wire(peer, eventually) -> None:
    sent = bundles(20, LARGE)
    peer.held = {bundle.key: bundle for bundle in sent}
    async with using(peer.address) as client:
        async with contextlib.aclosing(client.caches.fetch(keys_of(sent))) as found:
            await anext(found)
        await eventually(lambda: peer.cancelled == 1 and not peer.running)
        assert client.told == [("fetch", "cancelled")]
        assert client.caches.available


@pytest.mark.parametrize("operation", ["match", "fetch", "store"])
async def test_a_cancelled_caller_is_cancelled_on_the_wire_and_blames_nobody(peer, eventually, operation) -> None:
    async def never(request: pb.GetRequest, context: Any) -> AsyncIterator[pb.Chunk]:
        await endless()
        yield pb.Chunk()

    peer.match, peer.get, peer.put = (lambda request: endless()), never, (lambda chunks: endless())
    async with using(peer.address) as client:
        ask = {
            "match": lambda: client.caches.match(keys_of(bundles(1))),
            "fetch": lambda: client.fetched(keys_of(bundles(1))),
            "store": lambda: client.caches.store(bundles(1)),
        }
        asking = asyncio.create_task(ask[operation]())
        await eventually(lambda: peer.running)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await eventually(lambda: peer.cancelled == 1 and not peer.running)
        assert client.told == [(operation, "cancelled")]
        assert client.caches.available


async def test_an_error_of_the_source_is_the_callers_own(peer, eventually) -> None:
    def source() -> Any:
        yield bundles(1)[0]
        raise InvalidRequest("ours", field="ours")

    async with using(peer.address) as client:
        with pytest.raises(InvalidRequest, match="ours"):
            await client.caches.store(source())
        await eventually(lambda: not peer.running)
        assert client.told == [("store", "cancelled")]
        assert client.caches.available


async def test_an_answer_before_the_end_ends_a_store(peer) -> None:
    async def full(chunks: AsyncIterator[pb.Chunk]) -> pb.PutReply:
        await anext(aiter(chunks))
        return pb.PutReply(refused=1)

    peer.put = full
    async with using(peer.address) as client:
        assert await client.caches.store(itertools.islice(itertools.cycle(bundles(1, LARGE)), 50)) == 0
        assert client.told == [("store", "miss")]


async def test_bundles_that_the_service_could_not_take_are_told(peer) -> None:
    async def some(chunks: AsyncIterator[pb.Chunk]) -> pb.PutReply:
        count = len([chunk async for chunk in chunks])
        return pb.PutReply(stored=1, already_held=1, refused=count - 2)

    peer.put = some
    async with using(peer.address) as client:
        assert await client.caches.store(bundles(5)) == 2
    assert client.told == [("store", "miss")]


async def test_calls_are_spread_over_the_replicas_and_a_dead_one_is_passed_over() -> None:
    async with contextlib.AsyncExitStack() as stack:
        (one, first, server), (other, second, _) = [await stack.enter_async_context(played()) for _ in range(2)]
        client = await stack.enter_async_context(using(f"{first},{second}"))
        await until(lambda: len(client.caches.well) == 2)
        for _ in range(60):
            await client.caches.match(keys_of(bundles(1)))
        assert min(one.calls["match"], other.calls["match"]) >= 10
        await server.drain(0)
        before = other.calls["match"]
        for _ in range(20):
            await client.caches.match(keys_of(bundles(1)))
        assert other.calls["match"] >= before + 19
        assert Counter(client.told)["match", "unreachable"] <= 1


async def test_calls_at_once_go_where_fewest_run() -> None:
    async with contextlib.AsyncExitStack() as stack:
        (one, first, _), (other, second, _) = [await stack.enter_async_context(played()) for _ in range(2)]
        client = await stack.enter_async_context(using(f"{first},{second}"))
        await until(lambda: len(client.caches.well) == 2)
        await asyncio.gather(*(client.caches.match(keys_of(bundles(1))) for _ in range(10)))
        assert one.calls["match"] == other.calls["match"] == 5


def test_a_key_set_says_what_the_service_reads() -> None:
    found = bundles(2)
    assert key_set_message(keys_of(found)).keys == found[0].key + found[1].key
