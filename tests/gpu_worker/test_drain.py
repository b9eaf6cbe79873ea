"""Stopping (B21): readiness first, nothing new, what can end ends, the rest is parked; the real process's exit code."""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from gpu_worker.__main__ import main
from mesh.client import connect
from mesh.errors import error_of
from mesh.models import find
from shoal.types.v1 import types_pb2
from shoal.worker.v1 import worker_pb2, worker_pb2_grpc

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_drain_lets_answers_end_parks_the_rest_and_takes_nothing_new(
    own_worker: Any, ready: Any, eventually: Any
) -> None:
    async with own_worker(kind="simulated", drain_s=3, park_s=2) as rig:
        await ready(rig)
        endless = types_pb2.SamplingParams(temperature=0, max_tokens=8000)
        long = asyncio.ensure_future(_collect(rig.stub.Generate(rig.request(sampling=endless), timeout=60)))
        short = asyncio.ensure_future(
            _collect(rig.stub.Generate(rig.request(sampling=types_pb2.SamplingParams(max_tokens=40)), timeout=60))
        )
        await eventually(lambda: len(rig.bridge.load.running) == 2 and not rig.bridge.load.waiting_sequences)
        rig.stopping.set()
        await eventually(lambda: rig.scheduler.loads[-1].draining)
        assert await rig.health() == "NOT_SERVING"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _collect(rig.stub.Generate(rig.request(), timeout=5))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert error_of(caught.value).code == "draining"
        assert _end(await short).reason == types_pb2.FINISH_REASON_LENGTH
        parked = await long
        assert _end(parked).reason == types_pb2.FINISH_REASON_PARKED
        assert _end(parked).completion_tokens == sum(len(response.tokens.ids) for response in parked)
        await rig.serving


async def _collect(call: Any) -> list[Any]:
    return [response async for response in call]


def _end(responses: list[Any]) -> Any:
    [finished] = [response.finished for response in responses if response.HasField("finished")]
    return finished


@asynccontextmanager
async def _process(folder: Path, **variables: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """`python -m gpu_worker`, killed at the end if it has not ended by itself."""
    given = {"MODEL": str(folder), "PORT": "0", "KV_BYTES": "8MiB", "THREADS": "1", "SCHEDULERS": "127.0.0.1:1"}
    environ = os.environ | {f"SHOAL_WORKER_{name}": value for name, value in (given | variables).items()}
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gpu_worker", env=environ, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield worker
    finally:
        if worker.returncode is None:
            worker.kill()
        await worker.communicate()


async def _logged(worker: asyncio.subprocess.Process, event: str) -> dict[str, Any]:
    """The log's next line of this event."""
    assert worker.stderr is not None
    async with asyncio.timeout(60):
        async for line in worker.stderr:
            if b'"event": "' + event.encode() in line:
                entry: dict[str, Any] = json.loads(line)
                return entry
    raise AssertionError(f"the process ended without {event}")


async def test_a_process_tells_its_ports_answers_and_exits_with_zero_on_sigterm(
    tiny_model: Path, eventually: Any
) -> None:
    async with _process(tiny_model) as worker:
        port = (await _logged(worker, "listening"))["grpc_port"]
        await _logged(worker, "ready")
        children = psutil.Process(worker.pid).children(recursive=True)
        async with connect(f"127.0.0.1:{port}") as channel:
            request = worker_pb2.GenerateRequest(
                prompt_ids=[1, 2, 3],
                choices=[worker_pb2.Choice(index=0)],
                sampling=types_pb2.SamplingParams(max_tokens=4, ignore_eos=True),
                tokenizer_digest=find(str(tiny_model)).tokenizer_digest(),
                meta=types_pb2.RequestMeta(request_id="r", attempt=1),
            )
            responses = await _collect(worker_pb2_grpc.WorkerServiceStub(channel).Generate(request, timeout=20))
            assert _end(responses).completion_tokens == 4
        worker.send_signal(signal.SIGTERM)
        async with asyncio.timeout(10):
            assert await worker.wait() == 0
        await eventually(lambda: not [child for child in children if child.is_running()])


async def test_a_process_whose_engine_is_killed_exits_with_an_error(tiny_model: Path) -> None:
    async with _process(tiny_model, KIND="simulated") as worker:
        await _logged(worker, "ready")
        [engine] = [
            child for child in psutil.Process(worker.pid).children() if "spawn_main" in " ".join(child.cmdline())
        ]
        engine.kill()
        await _logged(worker, "failed")
        async with asyncio.timeout(10):
            assert await worker.wait() == 1


async def test_a_process_that_is_killed_leaves_no_engine_behind(tiny_model: Path, eventually: Any) -> None:
    async with _process(tiny_model, KIND="simulated") as worker:
        await _logged(worker, "ready")
        children = psutil.Process(worker.pid).children(recursive=True)
        worker.kill()
        await eventually(lambda: not [child for child in children if child.is_running()])


@pytest.mark.parametrize(("variable", "value"), [("SCHEDULERS", "nowhere"), ("PRECISION", "int1"), ("PORT", "many")])
async def test_a_setting_that_cannot_be_used_is_named_and_nothing_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variable: str, value: str
) -> None:
    monkeypatch.setenv(f"SHOAL_WORKER_{variable}", value)
    assert main() == 2
    assert value in capsys.readouterr().err


async def test_a_port_that_is_taken_is_said_and_nothing_stays(tiny_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = str(other.getsockname()[1])
        async with _process(tiny_model, PORT=taken) as worker:
            async with asyncio.timeout(60):
                _, said = await worker.communicate()
    assert worker.returncode == 2
    assert f"SHOAL_WORKER_PORT: cannot listen on 127.0.0.1:{taken}".encode() in said
    assert b"Traceback" not in said
