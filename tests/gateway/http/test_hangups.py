"""A client that hangs up: at every stage everything it held is given back at once, in both modes (fault B05)."""

import asyncio
import json

import pytest

from shoal.scheduler.v1 import scheduler_pb2 as sched

CALLS = 20


class Caller:
    """A bare socket, so that hanging up is one close and nothing else."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    @classmethod
    async def ask(cls, port, **body):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = {"model": "smollm2-135m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2000, **body}
        raw = json.dumps(body).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n\r\n"
        writer.write(head.encode() + raw)
        await writer.drain()
        return cls(reader, writer)

    def hang_up(self):
        self.writer.transport.abort()


@pytest.fixture
async def callers(mesh):
    async def make(stream):
        return [await Caller.ask(mesh.gateway.http_port, stream=stream) for _ in range(CALLS)]

    return make


async def gone(mesh, eventually):
    await eventually(lambda: not mesh.scheduler.leases, timeout_s=2)
    await eventually(lambda: not mesh.worker.running, timeout_s=2)
    await eventually(lambda: not mesh.gateway.core.in_flight.count, timeout_s=2)


@pytest.mark.parametrize("stream", [True, False])
async def test_while_queued(mesh, callers, eventually, stream):
    mesh.scheduler.open_gate.clear()
    calls = await callers(stream)
    await eventually(lambda: len(mesh.scheduler.of_kind("open")) == CALLS)
    for call in calls:
        call.hang_up()
    await gone(mesh, eventually)
    mesh.scheduler.open_gate.set()
    assert mesh.worker.requests == []


@pytest.mark.parametrize("stream", [True, False])
async def test_during_prefill(mesh, play, callers, eventually, stream):
    mesh.worker.scripts = [play.progresses]
    calls = await callers(stream)
    await eventually(lambda: mesh.worker.running == CALLS)
    for call in calls:
        call.hang_up()
    await gone(mesh, eventually)


@pytest.mark.parametrize("stream", [True, False])
async def test_after_five_tokens_which_are_booked(mesh, play, ids_of, callers, eventually, stream):
    answer = ids_of("one two three four five")
    mesh.worker.scripts = [play.first(6, play.says(answer), play.progresses) for _ in range(CALLS)]
    calls = await callers(stream)
    await eventually(lambda: mesh.worker.running == CALLS)
    if stream:
        for call in calls:
            await call.reader.readuntil(b"five")
    else:
        await eventually(lambda: len(mesh.worker.scripts) == 1)
    for call in calls:
        call.hang_up()
    await gone(mesh, eventually)
    ends = await eventually(lambda: mesh.scheduler.of_kind("finished"))
    assert {end.outcome for end in ends} == {sched.OUTCOME_CANCELLED}
    if stream:
        assert {end.usage.completion_tokens for end in ends} == {len(answer)}
        async with mesh.http() as client:
            metrics = (await client.get("/metrics")).text
        line = 'shoal_gateway_tokens_total{kind="completion",model="smollm2-135m"} '
        assert f"{line}{float(CALLS * len(answer))}" in metrics


async def test_a_neighbour_notices_nothing(mesh, play, ids_of, ask, eventually):
    answer = ids_of("one two three four five six")
    mesh.worker.scripts = [play.progresses, play.says(answer)]
    leaver = await Caller.ask(mesh.gateway.http_port, stream=True)
    await eventually(lambda: mesh.worker.running)
    asking = asyncio.create_task(ask(stream=True))
    leaver.hang_up()
    assert (await asking).text() == "one two three four five six"
    await gone(mesh, eventually)


async def test_while_sending_the_body(mesh, eventually):
    _, writer = await asyncio.open_connection("127.0.0.1", mesh.gateway.http_port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    await writer.drain()
    await eventually(lambda: mesh.gateway.core.in_flight.count)
    writer.transport.abort()
    await eventually(lambda: not mesh.gateway.core.in_flight.count)
    assert mesh.scheduler.events == []


async def test_a_client_that_never_reads_is_cut_off(mesh, play, ids_of, eventually):
    strict = await mesh.start_gateway(client_write_timeout_s=0.3)
    await eventually(lambda: not strict.missing)
    mesh.worker.scripts = [play.says(*[ids_of("word ") * 4000] * 8, batch=100)]
    deaf = await Caller.ask(strict.http_port, stream=True, n=8, logprobs=True, top_logprobs=20)
    deaf.writer.transport.pause_reading()
    await eventually(lambda: mesh.worker.running)
    await eventually(lambda: not strict.core.in_flight.count)
    await eventually(lambda: not mesh.worker.running)
    deaf.hang_up()
