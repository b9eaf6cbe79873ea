"""What happens to answers when processes are killed, stopped in good order, or left by their clients."""

import asyncio
import re
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]
Eventually = Callable[..., Awaitable[object]]
STORY = "Write a long story about a shoal of fish that crosses the ocean."
DRAWN = {"temperature": 0.8, "seed": 7, "ignore_eos": True, "max_tokens": 120}
# An answer of 32 tokens takes a second, and two workers have room for eight.
SIMULATED = {"SHOAL_WORKER_MAX_SEQUENCES": "4", "SHOAL_WORKER_SIMULATED_STEP_MS": "30"}


@pytest.fixture(scope="module")
def real(start_shared_mesh: Callable[..., Any]) -> Any:
    """Two workers with the real model. One that is to stop has no time to end an answer: it hands it on."""
    return start_shared_mesh({"SHOAL_WORKER_DRAIN_S": "1.5", "SHOAL_WORKER_PARK_S": "1"}, workers=2)


@pytest.fixture(scope="module")
def simulated(start_shared_mesh: Callable[..., Any]) -> Any:
    """Two simulated workers: for what does not depend on what they compute."""
    return start_shared_mesh(SIMULATED, engine="simulated", workers=2)


async def test_a_structured_answer_goes_on_elsewhere_as_if_nothing_had_happened(
    real: Any, chat: Callable[..., Any], eventually: Eventually
) -> None:
    await eventually(real.is_ready, timeout_s=60)
    body = {"temperature": 1, "seed": 4, "max_tokens": 80, "structured_outputs": {"regex": "([a-z]{2,9} ){30}end"}}
    undisturbed = await chat(real, STORY, **body)
    under_way = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        answer = group.create_task(chat(real, STORY, on_text=lambda _: under_way.set(), **body))
        await under_way.wait()
        [name] = await eventually(real.busy, timeout_s=5)  # type: ignore[misc]
        assert not answer.done(), "the answer ended too soon"
        real.kill(name)
    disturbed = answer.result()
    assert (disturbed.error, disturbed.done) == (None, True)
    assert (disturbed.text, disturbed.finish) == (undisturbed.text, undisturbed.finish)
    assert re.fullmatch("([a-z]{2,9} )*([a-z]*|end)", disturbed.text)
    await eventually(real.is_idle)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_worker_that_goes_in_mid_stream_leaves_the_text_unchanged(
    number: signal.Signals, real: Any, chat: Callable[..., Any], eventually: Eventually
) -> None:
    await eventually(real.is_ready, timeout_s=60)  # whom another test hurt may still be starting
    undisturbed = await chat(real, STORY, **DRAWN)
    assert undisturbed.finish == "length"
    under_way = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        answer = group.create_task(chat(real, STORY, on_text=lambda _: under_way.set(), **DRAWN))
        await under_way.wait()
        [name] = await eventually(real.busy, timeout_s=5)  # type: ignore[misc]
        assert not answer.done(), "the answer ended too soon"
        real.signal(name, number)
    disturbed = answer.result()
    assert (disturbed.error, disturbed.done) == (None, True)
    assert disturbed.text == undisturbed.text
    assert disturbed.usage["completion_tokens"] == undisturbed.usage["completion_tokens"]
    await eventually(real.is_idle)


async def test_killing_the_scheduler_leaves_running_streams_alone_and_queued_ones_go_on_when_it_is_back(
    simulated: Any, chat: Callable[..., Any], eventually: Eventually
) -> None:
    scheduler = simulated.process("scheduler-0")
    async with asyncio.TaskGroup() as group:
        streams = [group.create_task(chat(simulated, STORY, max_tokens=300, ignore_eos=True)) for _ in range(8)]
        await eventually(lambda: _running(simulated, 8))
        streams += [group.create_task(chat(simulated, STORY, max_tokens=8, ignore_eos=True)) for _ in range(40)]
        # Some wait in the workers (the look-ahead); the others wait in the scheduler that is about to die. One that it
        # has not heard of yet would be a new request without a scheduler.
        await eventually(lambda: _let_in(simulated, 48))
        simulated.kill("scheduler-0")
    for stream in streams:
        answer = stream.result()
        assert (answer.error, answer.finish, answer.done) == (None, "length", True)
    await eventually(_is_back(simulated, scheduler), timeout_s=60)
    await eventually(simulated.is_idle)


async def _running(mesh: Any, least: int) -> bool:
    load = await mesh.load()
    return load is not None and sum(worker.load.running_sequences for worker in load.workers) >= least


async def _let_in(mesh: Any, least: int) -> bool:
    load = await mesh.load()
    if load is None:
        return False
    in_workers = sum(worker.load.running_sequences + worker.load.waiting_sequences for worker in load.workers)
    return in_workers + sum(queue.waiting for queue in load.queues) >= least


async def test_sigterm_to_each_service_in_turn_under_load_loses_nothing(
    simulated: Any, chat: Callable[..., Any], eventually: Eventually
) -> None:
    """Twenty streams, running and queued, then SIGTERM: all end as they would have, and the service comes back."""
    asked = [{"temperature": 1, "seed": seed, "max_tokens": 32, "ignore_eos": True} for seed in range(20)]
    undisturbed = [answer.text for answer in await asyncio.gather(*(chat(simulated, STORY, **body) for body in asked))]
    assert len(set(undisturbed)) == len(asked)
    for service in ("scheduler-0", "worker-0", "gateway-0"):
        former = simulated.process(service)
        async with asyncio.TaskGroup() as group:
            streams = [group.create_task(chat(simulated, STORY, **body)) for body in asked]
            await eventually(lambda: _running(simulated, 4))
            simulated.signal(service, signal.SIGTERM)
        for stream, text in zip(streams, undisturbed, strict=True):
            answer = stream.result()
            assert answer.error is None, service
            assert (answer.finish, answer.done, answer.text) == ("length", True, text)
            assert answer.usage["completion_tokens"] == 32
        await eventually(_is_back(simulated, former), timeout_s=60)
        await eventually(simulated.is_idle)


def _is_back(mesh: Any, former: Any) -> Callable[[], bool]:
    """Whether the process runs anew, started once since `former` was its state."""

    def is_back() -> bool:
        now = mesh.process(former.name)
        return now.pid not in (former.pid, None) and now.restarts == former.restarts + 1 and mesh.is_ready()

    return is_back


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
