"""A mesh of simulated workers: it answers, says what it is, and a kill in mid-stream changes no word."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

import shoal

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]
STORY = "Write a long story about a shoal of fish that crosses the ocean."


async def test_a_simulated_mesh_says_so_and_a_kill_in_mid_stream_leaves_the_text_unchanged(
    start_mesh: Callable[..., Any], chat: Callable[..., Any], eventually: Callable[..., Awaitable[object]]
) -> None:
    mesh = await asyncio.to_thread(start_mesh, engine="simulated", workers=2, restart=False)
    await says_that_it_is_simulated(mesh)
    body = {"seed": 7, "ignore_eos": True, "max_tokens": 500}
    undisturbed = await chat(mesh, STORY, **body)
    assert undisturbed.finish == "length"
    assert len(undisturbed.text.split()) == 500

    busy: list[str] = []

    async def kill_the_busy_one() -> None:
        await eventually(lambda: running_on(mesh, busy))
        mesh.kill(busy[0])

    killing = asyncio.ensure_future(kill_the_busy_one())
    disturbed = await chat(mesh, STORY, **body)
    assert killing.done(), "the answer ended before the kill"
    await killing
    assert disturbed.error is None
    assert disturbed.done
    assert disturbed.text == undisturbed.text
    assert sum(process.pid is None for process in mesh.state.processes if process.role == "worker") == 1


async def says_that_it_is_simulated(mesh: Any) -> None:
    async with httpx.AsyncClient(timeout=30) as client:
        models = (await client.get(f"{mesh.url}/v1/models")).json()["data"]
        asked = {"model": mesh.plan.model, "prompt": "x", "logprobs": 1}
        refused = await client.post(f"{mesh.url}/v1/completions", json=asked)
    assert [(model["id"], model["simulated"]) for model in models] == [(mesh.plan.model, True)]
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logprobs")
    async with shoal.Client(mesh.state.grpc_address) as grpc_client:
        assert [model.simulated for model in await grpc_client.models()] == [True]


async def running_on(mesh: Any, busy: list[str]) -> bool:
    """Whether a worker runs something; its process's name is put into `busy`."""
    load = await mesh.load()
    ports = [int(w.hello.address.rpartition(":")[2]) for w in load.workers if w.load.running_sequences]
    busy += [p.name for p in mesh.state.processes if p.role == "worker" and p.ports["grpc"] in ports]
    return bool(busy)
