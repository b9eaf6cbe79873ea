"""A gateway's life: ready only when it can serve, and a stop that loses nothing (faults B21, B22, B24)."""

import asyncio
import json
import logging
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.catalogue import Catalogue
from gateway.settings import GatewaySettings
from mesh.errors import error_of
from mesh.settings import SettingsError
from shoal.gateway.v1 import gateway_pb2, gateway_pb2_grpc

BODY = {"model": "smollm2-135m", "messages": [{"role": "user", "content": "hi"}]}


async def health_of(gateway):
    async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
        reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
    return health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)


async def test_readiness_follows_scheduler_and_worker_while_liveness_stays(mesh, eventually):
    async def ready(client):
        reply = await client.get("/ready")
        assert (await client.get("/health")).status_code == 200
        assert (await health_of(mesh.gateway) == "SERVING") is (reply.status_code == 200)
        return reply

    async with mesh.http() as client:
        assert (await ready(client)).json() == {"ready": True, "models": ["smollm2-135m"]}
        mesh.scheduler.healthy = False
        mesh.scheduler.changed()
        await eventually(lambda: mesh.gateway.missing)
        unready = await ready(client)
        assert unready.status_code == 503
        assert unready.headers["retry-after"] == "1"
        assert unready.json()["missing"] == ["no healthy worker serves smollm2-135m"]
        mesh.scheduler.healthy, mesh.scheduler.settled = True, False
        mesh.scheduler.changed()
        await eventually(lambda: mesh.gateway.missing == ["no connected scheduler has settled"])
        await mesh.scheduler.kill()
        await eventually(lambda: mesh.gateway.missing == ["no scheduler is connected"])


async def test_a_worker_with_another_tokenizer_makes_nobody_ready(mesh, eventually):
    mesh.scheduler.digest = b"another"
    mesh.scheduler.changed()
    await eventually(lambda: mesh.gateway.missing == ["no healthy worker serves smollm2-135m"])


async def test_a_worker_that_was_not_heard_of_lately_makes_nobody_ready(mesh, eventually):
    mesh.scheduler.age_ms = 3001
    mesh.scheduler.changed()
    await eventually(lambda: mesh.gateway.missing == ["no healthy worker serves smollm2-135m"])
    async with mesh.http() as client:
        assert (await client.get("/v1/models")).json()["data"] == []
    mesh.scheduler.age_ms = 3000
    mesh.scheduler.changed()
    await eventually(lambda: not mesh.gateway.missing)


async def test_a_gateway_of_two_models_is_ready_when_each_is_served(mesh):
    texts = {name: mesh.text_model for name in ("smollm2-135m", "other")}
    catalogue = Catalogue(texts, mesh.gateway.core.catalogue._schedulers)
    assert catalogue.missing() == ["no healthy worker serves other"]


async def test_before_any_worker_no_model_is_listed(mesh, eventually):
    mesh.scheduler.workers.clear()
    mesh.scheduler.changed()
    await eventually(lambda: mesh.gateway.missing)
    async with mesh.http() as client:
        assert (await client.get("/v1/models")).json() == {"object": "list", "data": []}
        assert (await client.get("/v1/models/smollm2-135m")).status_code == 404
    async with grpc.aio.insecure_channel(f"127.0.0.1:{mesh.gateway.grpc_port}") as channel:
        stub = gateway_pb2_grpc.InferenceServiceStub(channel)
        assert not (await stub.ListModels(gateway_pb2.ListModelsRequest(), timeout=5)).models


class Stoppable:
    """A gateway in a task of its own, so that a test can begin its drain and look on."""

    def __init__(self, play, mesh, **given):
        self.stopping = asyncio.Event()
        self.started = asyncio.Event()
        self._task = asyncio.create_task(self._run(play, mesh, given))

    async def _run(self, play, mesh, given):
        async with play.serving(mesh.scheduler.address, mesh.text_model, **given) as self.gateway:
            self.started.set()
            await self.stopping.wait()

    async def stopped(self):
        await self._task


@pytest.fixture
async def stoppable(mesh, play, eventually):
    made = []

    async def make(**given):
        stoppable = Stoppable(play, mesh, **given)
        made.append(stoppable)
        await stoppable.started.wait()
        await eventually(lambda: not stoppable.gateway.missing)
        return stoppable

    yield make
    for stoppable in made:
        stoppable.stopping.set()
        await stoppable.stopped()


async def test_a_drain_lets_running_streams_end_and_takes_nothing_new(mesh, play, ids_of, ask, stoppable, eventually):
    leaving = await stoppable(drain_s=10)
    go_on = asyncio.Event()

    async def waits(worker, request, context):
        answer = ids_of("one two three")
        yield play.accepted()
        yield play.tokens(0, 0, answer[:1])
        async for response in play.progresses(worker, request, context):
            yield response
            if go_on.is_set():
                break
        yield play.tokens(0, 1, answer[1:])
        yield play.finished(request, 0, len(answer))

    mesh.worker.scripts = [waits]
    asking = [asyncio.create_task(ask(gateway=leaving.gateway, stream=True)) for _ in range(5)]
    asking += [asyncio.create_task(ask(gateway=leaving.gateway)) for _ in range(5)]
    await eventually(lambda: mesh.worker.running == 10)
    leaving.stopping.set()
    await eventually(lambda: leaving.gateway.missing == ["shutting down"])

    async with mesh.http(leaving.gateway) as client:
        refused = await client.post("/v1/chat/completions", json=BODY)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert (await client.get("/ready")).status_code == 503
    assert await health_of(leaving.gateway) == "NOT_SERVING"
    async with grpc.aio.insecure_channel(f"127.0.0.1:{leaving.gateway.grpc_port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await gateway_pb2_grpc.InferenceServiceStub(channel).Chat(gateway_pb2.ChatRequest(), timeout=5).read()
        assert error_of(caught.value).code == "draining"

    go_on.set()
    answers = await asyncio.gather(*asking)
    assert [stream.text() for stream in answers[:5]] == ["one two three"] * 5
    assert [a.json()["choices"][0]["message"]["content"] for a in answers[5:]] == ["one two three"] * 5
    await leaving.stopped()


async def test_what_outlives_the_drain_gets_an_error_and_done(mesh, play, ids_of, ask, stoppable, eventually):
    leaving = await stoppable(drain_s=0.1)
    running = play.first(3, play.says(ids_of("one two three")), play.progresses)
    mesh.worker.scripts = [running, play.progresses]
    streamed = asyncio.create_task(ask(gateway=leaving.gateway, stream=True))
    await eventually(lambda: mesh.worker.running == 1)
    unstarted = asyncio.create_task(ask(gateway=leaving.gateway, stream=True))
    await eventually(lambda: mesh.worker.running == 2)
    mesh.scheduler.open_gate.clear()
    queued = asyncio.create_task(ask(gateway=leaving.gateway))
    await eventually(lambda: len(mesh.scheduler.of_kind("open")) == 3)
    leaving.stopping.set()
    stream = await streamed
    assert stream.text() == "one two"
    assert stream.error["code"] == "draining"
    assert stream.done
    assert (await unstarted).status_code == 503
    assert (await queued).status_code == 503
    await leaving.stopped()
    assert not mesh.worker.running


async def test_a_client_that_does_not_read_holds_up_a_stop_no_longer_than_the_cut(
    mesh, play, ids_of, stoppable, eventually, caplog, monkeypatch
):
    waits_since = []
    pause, resume = HttpToolsProtocol.pause_writing, HttpToolsProtocol.resume_writing
    monkeypatch.setattr(
        HttpToolsProtocol, "pause_writing", lambda self: (pause(self), waits_since.append(time.monotonic()))
    )
    monkeypatch.setattr(HttpToolsProtocol, "resume_writing", lambda self: (resume(self), waits_since.clear()))
    leaving = await stoppable(drain_s=0.1, cut_s=0.1, client_write_timeout_s=60)
    logging.getLogger("uvicorn.error").addHandler(caplog.handler)
    mesh.worker.scripts = [play.says(*[ids_of("word ") * 8000] * 8, batch=100)]
    body = json.dumps({**BODY, "stream": True, "n": 8, "logprobs": True, "top_logprobs": 20}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", leaving.gateway.http_port)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
    await reader.readuntil(b"word")
    writer.transport.pause_reading()
    await eventually(lambda: waits_since and time.monotonic() - waits_since[0] > 0.5)
    leaving.stopping.set()
    async with asyncio.timeout(10):
        await leaving.stopped()
    assert (leaving.gateway.core.in_flight.count, mesh.worker.running) == (0, 0)
    await eventually(lambda: not mesh.scheduler.leases)
    logging.getLogger("uvicorn.error").removeHandler(caplog.handler)
    # No task had to be torn down, which would be an error in the log.
    assert caplog.text == ""
    writer.transport.abort()


async def test_a_late_first_result_commits_the_stream_and_fails_in_band(mesh, play, ask):
    eager = await mesh.start_gateway(sse_commit_s=0.2, request_timeout_s=2.0)
    mesh.worker.scripts = [play.progresses]
    began = time.monotonic()
    stream = await ask(gateway=eager, stream=True)
    assert (stream.status, stream.lines[0], stream.lines.count(": waiting")) == (200, ": waiting", 2)
    assert stream.error["type"] == "timeout_error"
    assert stream.done
    assert time.monotonic() - began < 4


async def test_a_stream_that_falls_silent_gives_signs_of_life(mesh, play, ids_of, ask):
    eager = await mesh.start_gateway(sse_commit_s=0.5, request_timeout_s=3.0)
    mesh.worker.scripts = [play.first(3, play.says(ids_of("one two three")), play.progresses)]
    stream = await ask(gateway=eager, stream=True)
    assert stream.text()
    assert ": waiting" in stream.lines[1:]
    assert stream.done


async def test_more_requests_than_may_be_in_flight_get_a_503(mesh, play, ask, eventually):
    small = await mesh.start_gateway(max_in_flight=1)
    await eventually(lambda: not small.missing)
    mesh.worker.scripts = [play.progresses]
    first = asyncio.create_task(ask(gateway=small, stream=True))
    await eventually(lambda: mesh.worker.running)
    refused = await ask(gateway=small)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "busy")
    assert refused.headers["retry-after"] == "1"
    first.cancel()
    await asyncio.wait([first])
    await eventually(lambda: not mesh.worker.running)


def test_serving_beyond_loopback_without_keys_needs_to_be_said():
    with pytest.raises(SettingsError, match="ALLOW_ANONYMOUS"):
        GatewaySettings.load(host="0.0.0.0")
    assert GatewaySettings.load(host="0.0.0.0", allow_anonymous=True).host == "0.0.0.0"


def test_a_list_of_models_names_each_once():
    assert GatewaySettings.load(model="a, b,a,").models == ("a", "b")
