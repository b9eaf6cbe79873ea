"""Health is the ability to work: (B22) loading, a stopped engine, a lost engine, each with a real process."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import psutil
import pytest

from gpu_worker.worker import EngineLost
from mesh.errors import error_of
from mesh.server import LIVENESS
from shoal.types.v1 import types_pb2

pytestmark = pytest.mark.asyncio(loop_scope="session")

LONG = types_pb2.SamplingParams(temperature=0, max_tokens=8000)


async def failure(call: Any) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return caught.value


async def first_tokens(call: Any) -> None:
    async for response in call:
        if response.HasField("tokens"):
            return


async def test_a_loading_worker_lives_is_not_ready_and_refuses_work(own_worker: Any, ready: Any) -> None:
    async with own_worker() as rig:
        assert await rig.health(LIVENESS) == "SERVING"
        assert await rig.health() == "NOT_SERVING"
        assert await rig.health("shoal.worker.v1.WorkerService") == "NOT_SERVING"
        error = await failure(rig.stub.Generate(rig.request(), timeout=5))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert error_of(error).code == "not_ready"
        assert rig.sample("engine_up") == 0
        await ready(rig)
        assert rig.bridge.load.steps > 0  # a real token was made
        assert rig.sample("engine_up") == 1


async def test_a_stopped_engine_is_not_ready_sends_no_progress_and_recovers(rig: Any, eventually: Any) -> None:
    heard: list[Any] = []

    async def listen(call: Any) -> None:
        async for response in call:
            heard.append(response)

    listening = asyncio.ensure_future(listen(rig.stub.Generate(rig.request(sampling=LONG), timeout=60)))
    await eventually(lambda: any(response.HasField("tokens") for response in heard))
    with stopped(rig.engine):
        await eventually(lambda: _not_serving(rig), timeout_s=5)
        assert await rig.health(LIVENESS) == "SERVING"
        assert rig.sample("engine_up") == 0
        await eventually(lambda: not rig.scheduler.loads[-1].healthy)
        error = await failure(rig.stub.Generate(rig.request(), timeout=5))
        assert error_of(error).code == "not_ready"
        count, seq = len(heard), rig.scheduler.loads[-1].seq
        await eventually(lambda: rig.scheduler.loads[-1].seq > seq)  # a second of the worker's own time
        assert len(heard) == count
    await eventually(rig.is_serving)
    await eventually(lambda: len(heard) > count)
    await eventually(lambda: rig.scheduler.loads[-1].healthy)
    listening.cancel()
    await eventually(lambda: rig.idle, timeout_s=1)


@contextmanager
def stopped(engine: psutil.Process) -> Iterator[None]:
    """The engine's process stands still inside the block."""
    engine.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        engine.send_signal(signal.SIGCONT)


async def _not_serving(rig: Any) -> bool:
    return not await rig.is_serving()


async def test_a_stopped_engine_stays_unready_although_its_clients_have_gone(rig: Any, eventually: Any) -> None:
    request = rig.request(sampling=LONG)
    call = rig.stub.Generate(request, timeout=60)
    await first_tokens(call)
    cancelled = rig.sample("requests_total", outcome="cancelled")
    with stopped(rig.engine):
        await eventually(lambda: not rig.bridge.well(), timeout_s=5)
        call.cancel()
        await eventually(lambda: rig.sample("requests_total", outcome="cancelled") > cancelled)
        assert not rig.bridge.well()
    await eventually(lambda: rig.bridge.well() and rig.idle)
    await eventually(rig.is_serving)


async def test_a_killed_engine_ends_every_stream_at_once_without_a_cause(own_worker: Any, ready: Any) -> None:
    async with own_worker(kind="simulated") as rig:
        await ready(rig)
        calls = [rig.stub.Generate(rig.request(sampling=LONG), timeout=60) for _ in range(3)]
        for call in calls:
            await first_tokens(call)
        rig.engine.kill()
        async with asyncio.timeout(3):
            errors = await asyncio.gather(*map(failure, calls))
            with pytest.raises(EngineLost, match="exit code -9"):
                await rig.serving
        assert {error.code() for error in errors} == {grpc.StatusCode.UNAVAILABLE}
        assert {error_of(error).code for error in errors} == {None}


async def test_an_engine_that_stays_stopped_is_given_up(own_worker: Any, ready: Any) -> None:
    async with own_worker(kind="simulated", overdue_s=0.2, hang_exit_s=0.3) as rig:
        await ready(rig)
        call = rig.stub.Generate(rig.request(sampling=LONG), timeout=60)
        await first_tokens(call)
        engine = rig.engine
        engine.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(5):
            error = await failure(call)
            with pytest.raises(EngineLost, match="no step"):
                await rig.serving
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert not psutil.pid_exists(engine.pid)


async def test_a_model_that_cannot_be_loaded_is_never_ready_and_ends_with_the_reason(
    own_worker: Any, tmp_path: Any
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    async with own_worker(kind="simulated", model=str(tmp_path)) as rig:
        with pytest.raises(EngineLost, match="vocab_size is 0"):
            await rig.serving
