"""What happens to answers when processes are killed, stopped in good order, or left by their clients."""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]
Eventually = Callable[..., Awaitable[object]]
STORY = "Write a long story about a shoal of fish that crosses the ocean."


def once(action: Callable[[], object], after_chars: int = 20) -> Callable[[Any], None]:
    """A callback that acts when that much text has arrived, and only then."""
    acted: list[bool] = []

    def on_text(answer: Any) -> None:
        if not acted and len(answer.text) >= after_chars:
            acted.append(True)
            action()

    return on_text


async def test_killing_the_only_worker_ends_the_stream_with_an_error_and_done_within_three_seconds(
    start_mesh: Callable[..., Any], chat: Callable[..., Any]
) -> None:
    mesh = await asyncio.to_thread(start_mesh, restart=False)
    killed_at = 0.0

    def kill() -> None:
        nonlocal killed_at
        mesh.kill("worker-0")
        killed_at = time.monotonic()

    answer = await chat(mesh, STORY, max_tokens=2000, ignore_eos=True, on_text=once(kill))
    assert killed_at, "the answer ended before the kill"
    assert answer.error is not None
    assert answer.error["message"]
    assert answer.done
    assert answer.last_byte_at - killed_at < 3.0
    body = {"model": mesh.plan.model, "prompt": "x", "stream": True}
    async with httpx.AsyncClient(timeout=30) as client:
        refused = await client.post(f"{mesh.url}/v1/completions", json=body)
    assert refused.status_code in (502, 503), "before the first token the status itself must tell"
    assert int(refused.headers["retry-after"]) >= 1


async def test_with_two_workers_a_kill_in_mid_stream_leaves_the_text_unchanged(
    start_mesh: Callable[..., Any], chat: Callable[..., Any], eventually: Eventually
) -> None:
    mesh = await asyncio.to_thread(start_mesh, workers=2, restart=False)
    body = {"temperature": 0.8, "seed": 7, "ignore_eos": True, "max_tokens": 120}
    undisturbed = await chat(mesh, STORY, **body)
    assert undisturbed.finish == "length"

    def kill_busy_worker() -> None:
        # The load report names the worker that runs it; asked in a thread of its own, the stream goes on meanwhile.
        asyncio.get_running_loop().run_in_executor(None, lambda: mesh.kill(busy_worker(mesh)))

    disturbed = await chat(mesh, STORY, on_text=once(kill_busy_worker), **body)
    assert disturbed.error is None
    assert disturbed.done
    assert disturbed.text == undisturbed.text
    assert disturbed.usage["completion_tokens"] == undisturbed.usage["completion_tokens"]
    assert sum(process.pid is None for process in mesh.state.processes if process.role == "worker") == 1
    await eventually(mesh.is_idle)


def busy_worker(mesh: Any) -> str:
    """Name of the worker process that runs something now."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        load = asyncio.run(mesh.load())
        for worker in load.workers if load is not None else ():
            if worker.load.running_sequences:
                port = int(worker.hello.address.rpartition(":")[2])
                return next(p.name for p in mesh.state.processes if p.role == "worker" and p.ports["grpc"] == port)
    raise AssertionError("no worker was busy")


async def test_killing_the_scheduler_leaves_running_streams_alone_and_queued_ones_go_on_when_it_is_back(
    start_mesh: Callable[..., Any], chat: Callable[..., Any], eventually: Eventually
) -> None:
    mesh = await asyncio.to_thread(start_mesh, {"SHOAL_WORKER_MAX_SEQUENCES": "2"})
    killed = asyncio.Event()

    def kill() -> None:
        mesh.kill("scheduler-0")
        killed.set()

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(chat(mesh, STORY, max_tokens=150, ignore_eos=True)) for _ in range(2)]
        await eventually(lambda: _running(mesh, 2))
        queued = [group.create_task(chat(mesh, f"{STORY} {n}", max_tokens=8)) for n in range(8)]
        # Four may wait in the worker (the look-ahead); the others wait in the scheduler that is about to die.
        await eventually(lambda: _queued(mesh, 2))
        kill()
    for task in [*running, *queued]:
        answer = task.result()
        assert answer.error is None
        assert answer.finish in ("length", "stop")
        assert answer.done
    assert mesh.process("scheduler-0").restarts == 1
    await eventually(mesh.is_idle)


async def _running(mesh: Any, least: int) -> bool:
    load = await mesh.load()
    return load is not None and sum(worker.load.running_sequences for worker in load.workers) >= least


async def _queued(mesh: Any, least: int) -> bool:
    load = await mesh.load()
    return load is not None and sum(queue.waiting for queue in load.queues) >= least


async def test_sigterm_to_each_service_in_turn_under_load_loses_nothing(
    start_mesh: Callable[..., Any], chat: Callable[..., Any], eventually: Eventually
) -> None:
    """Twenty streams, running and queued, then SIGTERM: all end whole, and the service comes back."""
    mesh = await asyncio.to_thread(start_mesh, workers=2)
    for service in ("scheduler-0", "worker-0", "gateway-0"):
        pid = mesh.process(service).pid
        async with asyncio.TaskGroup() as group:
            streams = [group.create_task(chat(mesh, f"{STORY} {n}", max_tokens=32, ignore_eos=True)) for n in range(20)]
            await eventually(lambda: _running(mesh, 4))
            await asyncio.to_thread(mesh.signal, service, signal.SIGTERM)
        for stream in streams:
            answer = stream.result()
            assert answer.error is None, service
            assert (answer.finish, answer.done) == ("length", True)
            assert answer.usage["completion_tokens"] == 32
        await eventually(_is_back(mesh, service, pid), timeout_s=60)
        assert mesh.process(service).restarts == 1
        await eventually(mesh.is_idle)


def _is_back(mesh: Any, service: str, former_pid: int) -> Callable[[], bool]:
    return lambda: mesh.process(service).pid not in (former_pid, None) and mesh.is_ready()


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_client_that_hangs_up_frees_its_blocks_within_a_second(
    streamed: bool, mesh: Any, eventually: Eventually
) -> None:
    body = {"model": mesh.plan.model, "prompt": STORY, "max_tokens": 2000, "ignore_eos": True, "stream": streamed}
    async with httpx.AsyncClient(timeout=60) as client:
        calls = [asyncio.ensure_future(client.post(f"{mesh.url}/v1/completions", json=body)) for _ in range(6)]
        await eventually(lambda: _running(mesh, 4))
        for call in calls:
            call.cancel()
        hung_up = time.monotonic()
        await asyncio.wait(calls)
        # The load report itself is up to 50 ms old; asking for it takes time on a busy machine.
        await eventually(mesh.is_idle, timeout_s=5)
    assert time.monotonic() - hung_up < 1.5
