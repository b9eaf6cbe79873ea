"""Scaling every role up and down under load: no request fails, and no answer differs from the undisturbed one."""

import asyncio
import itertools
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
import pytest

from mesh.cli.roles import MOST
from mesh.discovery import owner

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]
STREAMS = 16
TOKENS = 100
# One worker has room for a few of the streams: the others wait with a scheduler. An answer takes two seconds, and a
# worker that goes has less: it must hand answers on.
ENV = {
    "SHOAL_WORKER_MAX_SEQUENCES": "6",
    "SHOAL_WORKER_SIMULATED_STEP_MS": "20",
    "SHOAL_WORKER_SIMULATED_ANSWER_TOKENS": "0",
    "SHOAL_WORKER_DRAIN_S": "1.5",
    "SHOAL_WORKER_PARK_S": "0.75",
}


@pytest.fixture(scope="module")
def mesh(start_shared_mesh: Callable[..., Any]) -> Any:
    """One process of each role, with ports for a second gateway and no third."""
    return start_shared_mesh(env=ENV, engine="simulated", first_http_port=65534)


@dataclass
class Load:
    """Clients that ask again and again, at any gateway of the mesh: the next if one cannot be reached or drains."""

    mesh: Any
    undisturbed: dict[int, tuple[str, int]] = field(default_factory=dict)
    answers: Counter = field(default_factory=Counter)  # by the gateway that gave them
    passed_over: int = 0
    over: bool = False
    _turns: Any = field(default_factory=itertools.count)

    async def ask(self, client: httpx.AsyncClient, number: int) -> tuple[str, int]:
        """One whole answer: its text and its count of tokens."""
        body = {
            "model": self.mesh.plan.model,
            "messages": [{"role": "user", "content": f"Tell story number {number} of a shoal of fish."}],
            "max_tokens": TOKENS,
            "temperature": 1,
            "seed": number,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        urls = self.mesh.state.http_urls
        first = next(self._turns)
        for url in (urls[(first + turn) % len(urls)] for turn in range(len(urls))):
            try:
                async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
                    if response.status_code != 503:
                        assert response.status_code == 200, await response.aread()
                        answer = await whole(response)
                        self.answers[url] += 1
                        return answer
                    error = msgspec.json.decode(await response.aread())["error"]
                    assert error["code"] == "draining", error
            except httpx.ConnectError:
                pass
            self.passed_over += 1
        raise AssertionError(f"no gateway of {urls} takes requests")

    async def repeat(self, client: httpx.AsyncClient, number: int) -> None:
        """Until `over`: every answer must be the undisturbed one."""
        while not self.over:
            assert await self.ask(client, number) == self.undisturbed[number]


async def whole(response: httpx.Response) -> tuple[str, int]:
    text, tokens, done = "", 0, False
    async for line in response.aiter_lines():
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            done = True
            continue
        event = msgspec.json.decode(line.removeprefix("data: "))
        assert "error" not in event, event
        text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    assert done, "the stream ended without [DONE]"
    return text, tokens


def shoal(mesh: Any, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "mesh.cli.main", *words]
    return subprocess.run(command, env=mesh.env, capture_output=True, text=True, timeout=120)


def roles(mesh: Any) -> dict[str, int]:
    return dict(Counter(process.role for process in mesh.state.processes if process.role != "valkey"))


async def scale(mesh: Any, **counts: int) -> None:
    done = await asyncio.to_thread(shoal, mesh, "scale", *(f"{role}={count}" for role, count in counts.items()))
    assert done.returncode == 0, done.stderr
    assert "Killed" not in done.stdout, done.stdout
    assert roles(mesh).items() >= counts.items()
    assert mesh.state.phase == "ready"


async def new_owner(mesh: Any) -> str:
    """Add schedulers until one that came owns the queue; its name."""
    for count in range(2, MOST["scheduler"] + 1):
        await scale(mesh, scheduler=count)
        addresses = mesh.state.scheduler_addresses
        owning = addresses.index(owner(f"{mesh.plan.model}/", addresses))
        if owning:
            return f"scheduler-{owning}"
    raise AssertionError("no new scheduler owns the queue")


async def grants(mesh: Any, scheduler: str) -> float:
    """How often it has placed a request."""
    async with httpx.AsyncClient() as client:
        page = await client.get(f"http://127.0.0.1:{mesh.process(scheduler).ports['metrics']}/metrics")
    lines = [line for line in page.text.splitlines() if line.startswith("shoal_scheduler_grants_total")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


async def test_scaling_every_role_up_and_down_under_load_fails_no_request_and_changes_no_answer(
    mesh: Any, eventually: Callable[..., Awaitable[object]]
) -> None:
    load = Load(mesh)
    limits = httpx.Limits(max_keepalive_connections=0)  # a new connection each, as from many clients
    async with httpx.AsyncClient(timeout=60, limits=limits) as client:
        answers = await asyncio.gather(*(load.ask(client, number) for number in range(STREAMS)))
        load.undisturbed = dict(enumerate(answers))
        assert {tokens for _, tokens in answers} == {TOKENS}
        assert len({text for text, _ in answers}) == STREAMS
        async with asyncio.TaskGroup() as group:
            for number in range(STREAMS):
                group.create_task(load.repeat(client, number))
            await scale(mesh, worker=3, gateway=2, cache=2)
            successor = await new_owner(mesh)
            await eventually(lambda: grants(mesh, successor))
            second = mesh.state.http_urls[1]
            await eventually(lambda: load.answers[second])
            await scale(mesh, worker=1)  # now some wait with the new scheduler
            await asyncio.gather(scale(mesh, scheduler=1), scale(mesh, gateway=1, cache=1))
            load.over = True
    state = mesh.state
    assert (len(state.http_urls), len(state.scheduler_addresses)) == (1, 1)
    assert roles(mesh) == dict.fromkeys(MOST, 1)
    assert "parked" in mesh.log("gateway-0") + mesh.log("gateway-1"), "no answer was handed on"
    assert all(process.restarts == 0 for process in mesh.state.processes)


async def test_a_request_to_scale_that_cannot_be_carried_out_changes_nothing(mesh: Any) -> None:
    before = msgspec.structs.asdict(mesh.state)

    async def refused(*words: str) -> str:
        scaled = await asyncio.to_thread(shoal, mesh, "scale", *words)
        assert scaled.returncode == 1
        assert msgspec.structs.asdict(mesh.state) == before
        return scaled.stderr

    assert "'wroker' cannot be scaled" in await refused("worker=2", "wroker=2")
    assert "no free port from 65534" in await refused("cache=2", "gateway=3")
    model = mesh.home / "models" / mesh.plan.model
    model.rename(model.with_suffix(".away"))
    try:
        said = await refused("worker=2")
    finally:
        model.with_suffix(".away").rename(model)
    assert "worker-1 cannot use its settings" in said
    assert f"shoal pull {mesh.plan.model}" in said
