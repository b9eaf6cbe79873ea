"""The worker's client against a real server that plays by script: what each ending means, and when silence is one."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from mesh.clients import worker as worker_client
from mesh.clients.attempt import Accepted, ChoiceEnd, Job, Meta, Tokens
from mesh.clients.outcomes import FailureKind, RefusedCause, WorkerFailed, WorkerRefused
from mesh.clients.silence import SilenceAlarm
from mesh.clients.worker import Workers
from mesh.errors import (
    AlreadyExists,
    DeadlineExceeded,
    Internal,
    InvalidRequest,
    Mismatch,
    Overloaded,
    PayloadTooLarge,
    Unavailable,
    errors_as_status,
)
from mesh.sampling import Sampling
from mesh.server import Server
from shoal.types.v1 import types_pb2
from shoal.worker.v1 import worker_pb2 as pb
from shoal.worker.v1 import worker_pb2_grpc

Script = Callable[[Any], AsyncIterator[pb.GenerateResponse]]


class Scripted(worker_pb2_grpc.WorkerServiceServicer):
    def __init__(self) -> None:
        self.script: Script
        self.running = 0
        self.stops: list[pb.StopChoicesRequest] = []

    def add_to(self, server: grpc.aio.Server) -> None:
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, server)

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        self.running += 1
        try:
            async with errors_as_status(context):
                async for response in self.script(context):
                    yield response
        finally:
            self.running -= 1

    async def StopChoices(self, request: pb.StopChoicesRequest, context: Any) -> pb.StopChoicesReply:
        self.stops.append(request)
        return pb.StopChoicesReply()


@pytest.fixture
async def scripted() -> AsyncIterator[tuple[Scripted, str]]:
    peer = Scripted()
    server = Server({"shoal.worker.v1.WorkerService": peer.add_to})
    port = await server.start("127.0.0.1", 0)
    yield peer, f"127.0.0.1:{port}"
    await server.drain(0)


def job(*, emitted: int = 0, logprobs: int | None = None) -> Job:
    return Job(
        meta=Meta(request_id="r", tenant="t", model="m"),
        attempt=1,
        worker_id="w",
        prompt_ids=[1, 2, 3],
        choices={0: list(range(emitted))},
        sampling=Sampling(max_tokens=9, top_logprobs=logprobs),
        tokenizer_digest=b"d",
    )


def accepted() -> pb.GenerateResponse:
    cached = [types_pb2.CachedTokens(tier=types_pb2.KV_TIER_DEVICE, tokens=16)]
    return pb.GenerateResponse(accepted=pb.Accepted(cached=cached, precision="bf16", model_digest=b"w", queue_ms=4))


def tokens(position: int, *ids: int, choice: int = 0) -> pb.GenerateResponse:
    return pb.GenerateResponse(tokens=pb.Tokens(choice=choice, position=position, ids=ids))


def finished(choice: int = 0, reason: int = types_pb2.FINISH_REASON_STOP) -> pb.GenerateResponse:
    return pb.GenerateResponse(finished=pb.Finished(choice=choice, reason=reason))  # type: ignore[arg-type]


def says(*responses: pb.GenerateResponse, then: Exception | None = None) -> Script:
    async def script(context: Any) -> AsyncIterator[pb.GenerateResponse]:
        for response in responses:
            yield response
        if then is not None:
            raise then

    return script


@asynccontextmanager
async def generating(address: str, attempt: Job, timeout_s: float = 10) -> AsyncIterator[Any]:
    async with Workers() as workers, workers.generation(address, attempt, timeout_s=timeout_s) as generation:
        yield generation.events()


async def read(address: str, attempt: Job, timeout_s: float = 10) -> list[Any]:
    async with generating(address, attempt, timeout_s) as events:
        return [event async for event in events]


async def collect(events: Any, heard: list[Any]) -> None:
    async for event in events:
        heard.append(event)


async def test_a_generation_is_accepted_tokens_and_ends(scripted):
    peer, address = scripted
    peer.script = says(accepted(), tokens(2, 7, 8), tokens(4, 9), finished())
    first, *more, end = await read(address, job(emitted=2))
    assert first == Accepted({types_pb2.KV_TIER_DEVICE: 16}, "bf16", b"w", 4)
    assert [(event.position, list(event.ids)) for event in more if isinstance(event, Tokens)] == [(2, [7, 8]), (4, [9])]
    assert isinstance(end, ChoiceEnd)


async def test_all_that_was_said_before_a_failure_is_heard(scripted):
    peer, address = scripted
    peer.script = says(accepted(), *(tokens(at, at) for at in range(50)), then=Internal("boom", code="step_error"))
    heard = []
    async with generating(address, job()) as events:
        with pytest.raises(WorkerFailed) as caught:
            await collect(events, heard)
    assert len(heard) == 51
    assert caught.value.kind is FailureKind.STEP_ERROR


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (Overloaded("x", retry_after_s=7), RefusedCause.NO_ROOM),
        (Unavailable("x", code="draining"), RefusedCause.DRAINING),
        (Unavailable("x", code="not_ready"), RefusedCause.NOT_READY),
        (Mismatch("x"), RefusedCause.MISMATCH),
        (AlreadyExists("x"), RefusedCause.ALREADY_EXISTS),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value.name,
)
async def test_a_refusal_has_its_cause_and_delay(scripted, error, cause):
    peer, address = scripted
    peer.script = says(then=error)
    with pytest.raises(WorkerRefused) as caught:
        await read(address, job())
    assert (caught.value.cause, caught.value.retry_after_s) == (cause, error.retry_after_s)


@pytest.mark.parametrize("error", [InvalidRequest("x", field="prompt_ids"), PayloadTooLarge("x")], ids=repr)
async def test_what_can_never_run_is_the_callers_fault(scripted, error):
    peer, address = scripted
    peer.script = says(then=error)
    with pytest.raises(InvalidRequest) as caught:
        await read(address, job())
    assert (type(caught.value), caught.value.field) == (type(error), error.field)


@pytest.mark.parametrize(
    "responses",
    [
        [tokens(1, 7)],
        [tokens(0, 7), tokens(0, 7)],
        [tokens(0, 7), tokens(2, 7)],
        [tokens(0, 7, choice=1)],
        [finished(1)],
        [accepted()],
        [tokens(0, 7), finished(reason=99)],
        [tokens(0, 7), finished(reason=types_pb2.FINISH_REASON_UNSPECIFIED)],
    ],
    ids=["late start", "repeat", "gap", "unknown choice", "unknown end", "no end", "unknown reason", "no reason"],
)
async def test_nonsense_is_a_protocol_failure(scripted, responses):
    peer, address = scripted
    peer.script = says(*responses)
    with pytest.raises(WorkerFailed) as caught:
        await read(address, job())
    assert caught.value.kind is FailureKind.PROTOCOL


async def test_ids_without_the_log_probabilities_that_were_asked_are_nonsense(scripted):
    peer, address = scripted
    peer.script = says(tokens(0, 7))
    with pytest.raises(WorkerFailed, match="log-probabilities"):
        await read(address, job(logprobs=0))


async def test_nobody_there_is_a_failure_to_connect():
    with pytest.raises(WorkerFailed) as caught:
        await read("127.0.0.1:1", job())
    assert caught.value.kind is FailureKind.CONNECT


async def test_the_callers_time_is_told_apart_from_a_failure(scripted, monkeypatch):
    peer, address = scripted

    async def works(context: Any) -> AsyncIterator[pb.GenerateResponse]:
        while True:
            yield pb.GenerateResponse(progress=pb.Progress(engine_steps=1))
            await asyncio.sleep(0.05)

    peer.script = works
    with pytest.raises(DeadlineExceeded):
        await read(address, job(), timeout_s=0.3)


async def test_silence_is_a_hung_worker_and_a_slow_reader_is_not(scripted, monkeypatch, eventually):
    monkeypatch.setattr(worker_client, "HUNG_S", 0.3)
    peer, address = scripted

    async def falls_silent(context: Any) -> AsyncIterator[pb.GenerateResponse]:
        yield tokens(0, 7)
        yield tokens(1, 8)
        await asyncio.Event().wait()

    peer.script = falls_silent
    async with generating(address, job()) as events:
        assert isinstance(await anext(events), Tokens)
        await asyncio.sleep(0.6)  # we do not read: that is our own silence
        assert isinstance(await anext(events), Tokens)
        with pytest.raises(WorkerFailed) as caught:
            await anext(events)
    assert caught.value.kind is FailureKind.HUNG
    await eventually(lambda: not peer.running)


async def test_slow_steps_stretch_the_patience(scripted, monkeypatch):
    monkeypatch.setattr(worker_client, "HUNG_S", 0.3)
    peer, address = scripted

    async def slow(context: Any) -> AsyncIterator[pb.GenerateResponse]:
        yield pb.GenerateResponse(progress=pb.Progress(engine_steps=1, median_step_ms=100))
        await asyncio.sleep(0.8)
        yield finished()

    peer.script = slow
    assert len(await read(address, job())) == 1


async def test_leaving_the_block_ends_it_on_the_worker(scripted, eventually):
    peer, address = scripted

    async def endless(context: Any) -> AsyncIterator[pb.GenerateResponse]:
        position = 0
        while True:
            yield tokens(position, 1)
            position += 1
            await asyncio.sleep(0.01)

    peer.script = endless
    async with generating(address, job()) as events:
        await anext(events)
        assert peer.running == 1
    await eventually(lambda: not peer.running, timeout_s=1)


async def test_a_cut_ends_the_reading_with_its_error(scripted, eventually):
    peer, address = scripted

    async def waits(context: Any) -> AsyncIterator[pb.GenerateResponse]:
        yield accepted()
        await asyncio.Event().wait()

    peer.script = waits
    async with Workers() as workers, workers.generation(address, job(), timeout_s=10) as generation:
        events = generation.events()
        await anext(events)
        asyncio.get_running_loop().call_later(0.05, generation.cut, Unavailable("leaving"))
        with pytest.raises(Unavailable, match="leaving"):
            await anext(events)


async def test_stops_name_the_choice_and_what_to_keep(scripted):
    peer, address = scripted
    async with Workers() as workers:
        await workers.stop_choices(address, job(), {0: 5, 2: 7})
    [stop] = peer.stops
    assert (stop.request_id, stop.attempt) == ("r", 1)
    assert {entry.choice: entry.keep_tokens for entry in stop.choices} == {0: 5, 2: 7}


async def test_idle_channels_beyond_the_limit_are_closed(scripted, monkeypatch):
    monkeypatch.setattr(worker_client, "IDLE_CHANNELS", 1)
    peer, address = scripted
    peer.script = says(finished())
    async with Workers() as workers:
        for attempt_address in ("127.0.0.1:1", "127.0.0.1:2"):
            with pytest.raises(WorkerFailed):
                await workers.stop_choices(attempt_address, job(), {0: 1})
        async with workers.generation(address, job(), timeout_s=5) as generation:
            assert len([event async for event in generation.events()]) == 1
        assert list(workers._links) == [address]


async def test_a_late_event_loop_does_not_raise_the_alarm():
    rung = asyncio.Event()
    alarm = SilenceAlarm(0.1, rung.set)
    alarm.listen()
    time.sleep(0.5)  # the loop stands still; what the peer said meanwhile is unread
    await asyncio.sleep(0.05)
    alarm.heard()
    await asyncio.sleep(0.4)
    assert not rung.is_set()
    alarm.listen()
    async with asyncio.timeout(2):
        await rung.wait()
    alarm.close()
