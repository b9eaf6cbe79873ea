"""A worker's view of the cold cache against a server that plays by script: whatever it does is a miss, and told."""

import asyncio
import contextlib
import itertools
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest

from mesh.breaker import BreakerPolicy
from mesh.clients.cache import CacheBudgets, Caches
from mesh.errors import InvalidRequest, Overloaded, Unavailable, errors_as_status
from mesh.kv import Bundle, KeySet, KvGeometry
from mesh.kv_wire import Assembly, key_set_message, pieces_of
from mesh.server import Server
from shoal.cache.v1 import cache_pb2 as pb
from shoal.cache.v1 import cache_pb2_grpc

GEOMETRY = KvGeometry("fp16", block_tokens=16, layers=2, kv_heads=1, head_dim=8)
LARGE = KvGeometry("fp32", block_tokens=16, layers=61, kv_heads=8, head_dim=64)  # several pieces
NAMESPACE = b"n" * 16
PATIENT = CacheBudgets(match_s=20, stall_s=20, take_s=20, fetch_s=60, store_s=60)
HASTY = CacheBudgets(match_s=0.3, stall_s=0.3, take_s=0.3, fetch_s=20, store_s=20)
QUICK = BreakerPolicy(failures=3, open_s=0.02, open_most_s=0.05)
SHUT = BreakerPolicy(failures=3, open_s=60, open_most_s=60)


def bundles(count: int, geometry: KvGeometry = GEOMETRY) -> list[Bundle]:
    return [Bundle.of(bytes([n]) * 16, NAMESPACE, geometry, os.urandom(geometry.bundle_bytes)) for n in range(count)]


def keys_of(found: list[Bundle]) -> KeySet:
    return KeySet(NAMESPACE, tuple(each.key for each in found), found[0].geometry)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 (a state of the peer's, which has no event)
            await asyncio.sleep(0.005)


async def endless() -> None:
    await asyncio.Event().wait()


class Scripted(cache_pb2_grpc.CacheServiceServicer):
    """A cache that holds `held`; a test may replace what it does."""

    def __init__(self) -> None:
        self.held: dict[bytes, Bundle] = {}
        self.calls: Counter[str] = Counter()
        self.running = 0
        self.cancelled = 0
        self.match: Callable[[pb.MatchRequest], Any] | None = None
        self.get: Callable[[pb.GetRequest, Any], AsyncIterator[pb.Chunk]] | None = None
        self.put: Callable[[AsyncIterator[pb.Chunk]], Any] | None = None
        self.stats: Callable[[], Any] | None = None

    def add_to(self, server: grpc.aio.Server) -> None:
        cache_pb2_grpc.add_CacheServiceServicer_to_server(self, server)

    @contextlib.asynccontextmanager
    async def _call(self, name: str, context: Any) -> AsyncIterator[None]:
        self.calls[name] += 1
        self.running += 1
        try:
            async with errors_as_status(context):
                yield
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    async def Match(self, request: pb.MatchRequest, context: Any) -> pb.MatchReply:
        async with self._call("match", context):
            if self.match is not None:
                return await self.match(request)
            asked = [request.keys.keys[at : at + 16] for at in range(0, len(request.keys.keys), 16)]
            return pb.MatchReply(leading_blocks=len(list(itertools.takewhile(self.held.__contains__, asked))))

    async def Get(self, request: pb.GetRequest, context: Any) -> AsyncIterator[pb.Chunk]:
        async with self._call("get", context):
            if self.get is not None:
                async for chunk in self.get(request, context):
                    await context.write(chunk)
                return
            for at in range(0, len(request.keys.keys), 16):
                bundle = self.held.get(request.keys.keys[at : at + 16])
                if bundle is None:
                    return
                for piece in pieces_of(bundle):
                    await context.write(piece)
        for nothing in ():
            yield nothing

    async def Put(self, request_iterator: AsyncIterator[pb.Chunk], context: Any) -> pb.PutReply:
        async with self._call("put", context):
            if self.put is not None:
                return await self.put(request_iterator)
            stored, assembly = 0, None
            async for chunk in request_iterator:
                if assembly is None:
                    assembly = Assembly(chunk, 2**30)
                else:
                    assembly.add(chunk)
                if assembly.whole:
                    bundle, assembly = assembly.bundle(), None
                    self.held[bundle.key] = bundle
                    stored += 1
            return pb.PutReply(stored=stored)

    async def Stats(self, request: pb.StatsRequest, context: Any) -> pb.StatsReply:
        async with self._call("stats", context):
            if self.stats is not None:
                await self.stats()
            return pb.StatsReply()


@contextlib.asynccontextmanager
async def played(port: int = 0) -> AsyncIterator[tuple[Scripted, str, Server]]:
    peer = Scripted()
    server = Server({"shoal.cache.v1.CacheService": peer.add_to})
    bound = await server.start("127.0.0.1", port)
    try:
        yield peer, f"127.0.0.1:{bound}", server
    finally:
        await server.drain(0)


class Using:
    """A client, and what it told."""

    def __init__(self, caches: Caches, told: list[tuple[str, str]]) -> None:
        self.caches = caches
        self.told = told

    async def fetched(self, keys: KeySet) -> list[Bundle]:
        return [bundle async for bundle in self.caches.fetch(keys)]


@contextlib.asynccontextmanager
async def using(
    targets: str, budgets: CacheBudgets = PATIENT, breaker: BreakerPolicy = SHUT, *, ready: bool = True
) -> AsyncIterator[Using]:
    told: list[tuple[str, str]] = []
    caches = Caches(targets, lambda operation, outcome: told.append((operation, str(outcome))), budgets, breaker)
    running = asyncio.create_task(caches.run())
    try:
        await until(lambda: caches.available or not ready)
        yield Using(caches, told)
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


@pytest.fixture
async def peer() -> AsyncIterator[Scripted]:
    async with played() as (scripted, address, _):
        scripted.address = address
        yield scripted


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


def broken(change: Callable[[pb.Chunk], None], at: int = 1) -> Callable[[list[Bundle]], Any]:
    def script(sent: list[Bundle]) -> Any:
        async def lies(request: pb.GetRequest, context: Any) -> AsyncIterator[pb.Chunk]:
            for index, bundle in enumerate(sent):
                for piece in pieces_of(bundle):
                    if index == at:
                        change(piece)
                    yield piece

        return lies

    return script


def setting(**values: object) -> Callable[[pb.Chunk], None]:
    def change(piece: pb.Chunk) -> None:
        for name, value in values.items():
            setattr(piece.header, name, value)

    return change


def flip(piece: pb.Chunk) -> None:
    piece.payload = piece.payload[:-1] + bytes([piece.payload[-1] ^ 1])


def cut(piece: pb.Chunk) -> None:
    piece.payload = piece.payload[:-1]


LIES = {
    "another key": setting(key=b"x" * 16),
    "another tenant's": setting(namespace=b"x" * 16),
    "another dtype of the same size": setting(kv_dtype="bf16"),
    "another geometry of the same size": setting(layers=1, kv_heads=2),
    "a size of its own": setting(payload_bytes=10),
    "another format": setting(format_version=2),
    "another checksum": setting(checksum=7),
    "a flipped bit": flip,
    "a cut payload": cut,
    "an offset": lambda piece: setattr(piece, "offset", 5),
    "no header": lambda piece: piece.ClearField("header"),
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_lie_ends_a_fetch_before_it_is_believed(peer, lie) -> None:
    sent = bundles(3)
    peer.get = broken(LIES[lie])(sent)
    async with using(peer.address) as client:
        assert await client.fetched(keys_of(sent)) == sent[:1]
        assert client.told == [("fetch", "mismatch")]
        assert client.caches.available  # once is no reason yet


async def test_a_truncated_last_bundle_is_a_mismatch(peer) -> None:
    sent = bundles(2)
    peer.get = broken(cut)(sent)
    async with using(peer.address) as client:
        assert await client.fetched(keys_of(sent)) == sent[:1]
    assert client.told == [("fetch", "mismatch")]


async def test_a_match_beyond_what_was_asked_is_none(peer) -> None:
    async def more(request: pb.MatchRequest) -> pb.MatchReply:
        return pb.MatchReply(leading_blocks=2)

    peer.match = more
    async with using(peer.address) as client:
        assert await client.caches.match(keys_of(bundles(1))) == 0
    assert client.told == [("match", "mismatch")]


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


async def test_a_call_that_outlives_its_replicas_channel_is_a_miss_and_no_cancel(peer, monkeypatch, eventually) -> None:
    monkeypatch.setattr("mesh.clients.cache.GOODBYE_S", 0.05)
    peer.match = lambda request: endless()
    async with using(peer.address) as client:
        asking = asyncio.create_task(client.caches.match(keys_of(bundles(1))))
        await eventually(lambda: peer.running)
    assert await asking == 0
    assert client.told == [("match", "unreachable")]


def test_a_key_set_says_what_the_service_reads() -> None:
    found = bundles(2)
    assert key_set_message(keys_of(found)).keys == found[0].key + found[1].key
