"""A mesh of simulated workers says what it is, survives the loss of a worker, and tells when none is left."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

import shoal

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]
STORY = "Write a long story about a shoal of fish that crosses the ocean."
DRAWN = {"seed": 7, "ignore_eos": True, "max_tokens": 500}
Eventually = Callable[..., Awaitable[object]]


async def test_a_simulated_mesh_says_so_survives_one_worker_and_tells_when_the_last_is_killed(
    start_mesh: Callable[..., Any], chat: Callable[..., Any], eventually: Eventually
) -> None:
    env = {"SHOAL_SCHEDULER_RESTART_GRACE_S": "2"}
    mesh = await asyncio.to_thread(start_mesh, env, engine="simulated", workers=2, restart=False)
    await says_that_it_is_simulated(mesh)
    await a_kill_in_mid_stream_leaves_the_text_unchanged(mesh, chat, eventually)
    await killing_the_last_worker_ends_the_stream_with_an_error_and_done(mesh, chat, eventually)
    await what_is_not_answered_has_a_true_status(mesh)


async def says_that_it_is_simulated(mesh: Any) -> None:
    async with httpx.AsyncClient(timeout=30) as client:
        models = (await client.get(f"{mesh.url}/v1/models")).json()["data"]
        asked = {"model": mesh.plan.model, "prompt": "x", "logprobs": 1}
        refused = await client.post(f"{mesh.url}/v1/completions", json=asked)
    assert [(model["id"], model["simulated"]) for model in models] == [(mesh.plan.model, True)]
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logprobs")
    async with shoal.Client(mesh.state.grpc_address) as grpc_client:
        assert [model.simulated for model in await grpc_client.models()] == [True]


async def a_kill_in_mid_stream_leaves_the_text_unchanged(mesh: Any, chat: Any, eventually: Eventually) -> None:
    undisturbed = await chat(mesh, STORY, **DRAWN)
    assert undisturbed.finish == "length"
    assert len(undisturbed.text.split()) == DRAWN["max_tokens"]
    disturbed, _ = await answer_and_kill(mesh, chat, eventually)
    assert (disturbed.error, disturbed.done) == (None, True)
    assert disturbed.text == undisturbed.text


async def killing_the_last_worker_ends_the_stream_with_an_error_and_done(
    mesh: Any, chat: Any, eventually: Eventually
) -> None:
    answer, killed_at = await answer_and_kill(mesh, chat, eventually)
    assert answer.error is not None
    assert answer.error["message"]
    assert answer.done
    assert 1.9 < answer.last_byte_at - killed_at < 3.0
    assert not [process for process in mesh.state.processes if process.role == "worker" and process.pid is not None]


async def what_is_not_answered_has_a_true_status(mesh: Any) -> None:
    body = {"model": mesh.plan.model, "prompt": "x", "stream": True}
    async with httpx.AsyncClient(timeout=30) as client:
        refused = await client.post(f"{mesh.url}/v1/completions", json=body)
    assert refused.status_code in (502, 503), "before the first token the status itself must tell"
    assert int(refused.headers["retry-after"]) >= 1


async def answer_and_kill(mesh: Any, chat: Any, eventually: Eventually) -> tuple[Any, float]:
    """An answer whose worker is killed once there is text, and when that was."""
    under_way, killed_at = asyncio.Event(), 0.0
    async with asyncio.TaskGroup() as group:
        answer = group.create_task(chat(mesh, STORY, on_text=lambda _: under_way.set(), **DRAWN))
        await under_way.wait()
        [name] = await eventually(mesh.busy, timeout_s=5)  # type: ignore[misc]
        assert not answer.done(), "the answer ended before the kill"
        mesh.kill(name)
        killed_at = time.monotonic()
    return answer.result(), killed_at
