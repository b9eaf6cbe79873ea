"""What a connection may keep the gateway waiting for, and what happens when there are too many."""

import asyncio
import json
import resource
import socket
from contextlib import AsyncExitStack

import grpc
import pytest

from gateway.http.answering import HttpLimits
from gateway.http.app import build_app
from gateway.http.connection import Connection
from gateway.http.server import MOST_CONNECTIONS, SEND_BUFFER_BYTES, HttpServer, connections_at_most
from shoal.gateway.v1 import gateway_pb2, gateway_pb2_grpc

HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.fixture
async def serve(mesh):
    """`await serve(timeout_s, most)`: an HTTP server over the mesh's gateway, with limits of its own."""
    async with AsyncExitStack() as stack:

        async def started(timeout_s=30.0, most=0):
            limits = HttpLimits(1 << 20, timeout_s, 10.0, max_connections=most)
            server = HttpServer(build_app(mesh.gateway.core, limits), "127.0.0.1", 0, 30.0)
            group = await stack.enter_async_context(asyncio.TaskGroup())
            group.create_task(server.serve())
            stack.callback(setattr, server, "should_exit", True)
            await server.listening.wait()
            return server

        yield started


@pytest.fixture
async def connect():
    """`await connect(server, sent)`: a reader and a writer."""
    writers = []

    async def connected(server, sent=b""):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writers.append(writer)
        writer.write(sent)
        await writer.drain()
        return reader, writer

    yield connected
    for writer in writers:
        writer.transport.abort()


async def ended(reader):
    """All that comes until the server closes."""
    async with asyncio.timeout(5):
        return await reader.read()


async def answer(reader):
    """The status and body of one answer that has a length."""
    async with asyncio.timeout(5):
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:"))
        return int(head.split()[1]), json.loads(await reader.readexactly(length))


def counted(mesh, status):
    return mesh.gateway.core.metrics.registry.get_sample_value(
        "shoal_gateway_requests_total", {"route": "connection", "outcome": status}
    )


@pytest.mark.parametrize("sent", [b"", b"\r\n"], ids=["nothing", "an empty line"])
async def test_a_connection_that_asks_nothing_is_closed_without_a_word(mesh, serve, connect, sent):
    reader, _ = await connect(await serve(timeout_s=0.2), sent)
    assert await ended(reader) == b""
    assert counted(mesh, "408") == 1


@pytest.mark.parametrize("sent", [b"POST /v1/c", b"GET /health HTTP/1.1\r\nhost: x\r\n"])
async def test_headers_that_do_not_end_are_a_408(mesh, serve, connect, sent):
    reader, _ = await connect(await serve(timeout_s=0.2), sent)
    status, body = await answer(reader)
    assert (status, body["error"]["code"]) == (408, "request_timeout")
    assert await ended(reader) == b""
    assert counted(mesh, "408") == 1


async def test_headers_that_trickle_are_a_408_after_the_same_time(serve, connect):
    reader, writer = await connect(await serve(timeout_s=0.3), b"GET /health HTTP/1.1\r\nx: ")

    async def trickle():
        while not reader.at_eof():
            writer.write(b"x")
            await asyncio.sleep(0.02)

    trickling = asyncio.create_task(trickle())
    try:
        assert (await answer(reader))[0] == 408
    finally:
        trickling.cancel()


@pytest.mark.parametrize("after", [b"\r\n", b"GET"], ids=["an empty line", "half a request"])
async def test_the_headers_of_a_connections_next_request_have_the_same_deadline(serve, connect, after):
    reader, writer = await connect(await serve(timeout_s=0.2), HEALTH)
    assert (await answer(reader))[0] == 200
    writer.write(after)
    assert (await ended(reader)).startswith(b"HTTP/1.1 408 " if after == b"GET" else b"")


async def test_what_was_answered_before_its_body_came_does_not_keep_the_connection(serve, connect):
    reader, writer = await connect(
        await serve(timeout_s=0.2), b"GET /health HTTP/1.1\r\nhost: x\r\ncontent-length: 9999\r\n\r\n"
    )
    assert (await answer(reader))[0] == 200
    writer.write(b"x")
    assert await ended(reader) == b""


async def test_an_answer_may_take_longer_than_its_headers_might(mesh, serve, connect, play, ids_of):
    server = await serve(timeout_s=0.2)
    mesh.scheduler.open_gate.clear()
    mesh.worker.scripts = [play.says(ids_of("ok"))]
    raw = json.dumps({"model": "smollm2-135m", "prompt": "x"}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n\r\n"
    reader, _ = await connect(server, head.encode() + raw)
    idle, _ = await connect(server)
    await ended(idle)  # the deadline of both is over
    mesh.scheduler.open_gate.set()
    assert (await answer(reader))[0] == 200


async def test_a_body_that_stalls_is_a_408_that_closes_the_connection(mesh, serve, connect, eventually):
    sent = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"
    reader, _ = await connect(await serve(timeout_s=0.2), sent)
    status, body = await answer(reader)
    assert (status, body["error"]["code"]) == (408, "request_timeout")
    assert await ended(reader) == b""
    await eventually(lambda: not mesh.gateway.core.in_flight.count)


async def test_the_longest_idle_connection_gives_way_to_a_new_one(serve, connect):
    server = await serve(most=3)
    kept_alive = await connect(server, HEALTH)
    await answer(kept_alive[0])
    first, second = [await connect(server) for _ in range(2)]
    kept_alive[1].write(HEALTH)  # now the first of the silent ones is idle for longer
    await answer(kept_alive[0])
    newcomer = await connect(server, HEALTH)
    assert (await answer(newcomer[0]))[0] == 200
    assert await ended(first[0]) == b""
    for reader, writer in (second, kept_alive):
        writer.write(HEALTH)
        assert (await answer(reader))[0] == 200


async def test_the_limit_is_a_setting(mesh):
    small = await mesh.start_gateway(max_connections=1)
    first, writer = await asyncio.open_connection("127.0.0.1", small.http_port)
    async with mesh.http(small) as client:
        assert (await client.get("/health")).status_code == 200
    assert await ended(first) == b""
    writer.close()


async def test_where_all_are_busy_a_new_connection_is_a_503_and_the_others_go_on(
    mesh, serve, connect, play, ids_of, eventually
):
    server = await serve(most=2)
    mesh.scheduler.open_gate.clear()
    mesh.worker.scripts = [play.says(ids_of("ok")) for _ in range(3)]
    raw = json.dumps({"model": "smollm2-135m", "prompt": "x"}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n\r\n"
    busy = [await connect(server, head.encode() + raw) for _ in range(2)]
    await eventually(lambda: len(mesh.scheduler.of_kind("open")) == 2)

    reader, writer = await connect(server)
    refused = await ended(reader)
    head, _, body = refused.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
    assert b"\r\nretry-after: 1" in head
    assert json.loads(body)["error"]["code"] == "busy"
    assert counted(mesh, "503") == 1
    writer.close()

    async with grpc.aio.insecure_channel(f"127.0.0.1:{mesh.gateway.grpc_port}") as channel:
        stub = gateway_pb2_grpc.InferenceServiceStub(channel)
        assert (await stub.ListModels(gateway_pb2.ListModelsRequest(), timeout=5)).models
    mesh.scheduler.open_gate.set()
    for reader, _ in busy:
        assert (await answer(reader))[0] == 200
    assert (await answer((await connect(server, HEALTH))[0]))[0] == 200


@pytest.mark.parametrize(
    ("descriptors", "connections"),
    [(1024, 512), (1 << 20, MOST_CONNECTIONS), (resource.RLIM_INFINITY, MOST_CONNECTIONS)],
)
def test_without_a_limit_given_it_is_half_of_what_the_process_may_open(descriptors, connections):
    assert connections_at_most(descriptors) == connections


async def test_the_kernel_keeps_little_of_an_answer_that_nobody_reads(serve, connect):
    server = await serve()
    reader, _ = await connect(server, HEALTH)
    await answer(reader)
    [connection] = server.server_state.connections
    assert isinstance(connection, Connection)
    accepted = connection.transport.get_extra_info("socket")
    assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= 2 * SEND_BUFFER_BYTES
