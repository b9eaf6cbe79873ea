"""The mesh in containers: started, asked, measured, hurt, stopped. In this order; `make compose-test` runs it."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

import shoal

pytestmark = pytest.mark.timeout(3600)
Eventually = Callable[..., Awaitable[object]]
MODEL = "smollm2-135m"
QUESTION = "What is the capital of Japan?"
STORY = "Write a long story about a shoal of fish that crosses the ocean."
RUNNING = 'shoal_worker_sequences{state="running"}'
# Fault B21's streams: more than the workers run at once, so that some wait in the scheduler.
STREAMS = 20


@dataclass(slots=True)
class Answer:
    """A streamed completion as a client saw it, to its very end."""

    text: str = ""
    finish: str | None = None
    error: dict[str, Any] | None = None
    done: bool = False

    @property
    def whole(self) -> tuple[object, ...]:
        return self.error, self.finish, self.done


WHOLE = (None, "length", True)


async def complete(url: str, prompt: str, tokens: int, answer: Answer) -> Answer:
    """Stream `tokens` tokens into `answer`."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    async with (
        httpx.AsyncClient(timeout=120) as client,
        client.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}) as response,
    ):
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                answer.done = True
            elif line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                answer.error = event.get("error", answer.error)
                for choice in event.get("choices", ()):
                    answer.text += choice["text"]
                    answer.finish = choice["finish_reason"] or answer.finish
    return answer


async def test_images_run_as_nobody_special_and_only_the_workers_has_torch(stack: Any) -> None:
    look = "import importlib.util as u, os; print(os.getuid(), bool(u.find_spec('torch')), bool(u.find_spec('pip')))"
    seen = {}
    for image in ("gateway", "scheduler", "gpu-worker", "cache-service", "tools"):
        seen[image] = stack.in_image(f"shoal-{image}:test", "python", "-c", look)
    assert seen == {
        "gateway": "10001 False False",
        "scheduler": "10001 False False",
        "gpu-worker": "10001 True False",
        "cache-service": "10001 False False",
        "tools": "10001 False True",
    }


async def test_health_is_never_true_before_a_model_is_loaded(mesh: Any) -> None:
    """Fault B22, in a start that is slow: no container is called healthy too early, or ever unhealthy."""
    loaded = {worker.id: worker.events("ready")[0] for worker in mesh.of("gpu_worker")}
    first = min(loaded.values())
    assert {sight.container.id for sight in mesh.sights} >= loaded.keys(), "every worker was seen from its start on"
    waiting = [sight for sight in mesh.sights if sight.health == "starting"]
    assert len({sight.container.id for sight in waiting}) == 4, "gateways and workers were seen while they waited"
    for sight in mesh.sights:
        assert sight.health in ("starting", "healthy"), sight
        if sight.health == "healthy":
            assert sight.at >= loaded.get(sight.container.id, first), sight
        if sight.ready == 200:
            assert sight.at >= first, sight
    assert any(sight.ready == 503 and sight.at < first for sight in mesh.sights), "a gateway said that it is not ready"


async def test_every_gateway_answers_over_http_and_grpc(mesh: Any) -> None:
    body = {"model": MODEL, "temperature": 0, "messages": [{"role": "user", "content": QUESTION}]}
    assert len(mesh.of("gateway")) == 2
    for gateway in mesh.of("gateway"):
        async with httpx.AsyncClient(timeout=60) as client:
            answer = (await client.post(f"{gateway.url}/v1/chat/completions", json=body)).json()
        assert "Tokyo" in answer["choices"][0]["message"]["content"]
        async with shoal.Client(gateway.address(50051)) as grpc_client:
            pieces = [piece.text async for piece in grpc_client.chat(QUESTION, model=MODEL, temperature=0)]
        assert "Tokyo" in "".join(pieces)


async def test_prometheus_scrapes_every_replica_of_all_four_services(mesh: Any, eventually: Eventually) -> None:
    expected = {"gateway": 2, "gpu_worker": 2, "scheduler": 1, "cache_service": 1}
    await eventually(lambda: counts(mesh, "sum by (job) (up)") == expected, timeout_s=60, every_s=1)
    assert counts(mesh, "count by (job) (up)") == expected


def counts(mesh: Any, query: str) -> dict[str, float]:
    return {row["metric"]["job"]: float(row["value"][1]) for row in mesh.query(query)}


async def test_the_dashboards_panels_show_the_answers_that_were_given(mesh: Any, eventually: Eventually) -> None:
    shown = ("Requests by outcome", "Time to first token", "KV blocks", "CPU", "Gateway CPU per output token")
    async with asyncio.TaskGroup() as group:
        for gateway in mesh.of("gateway"):
            group.create_task(complete(gateway.url, STORY, 32, Answer()))
    panels = mesh.panels()
    for title in shown:
        for expression in panels[title]:
            await eventually(lambda expression=expression: mesh.query(expression), timeout_s=60, every_s=1)
    for expression in (expression for expressions in panels.values() for expression in expressions):
        mesh.query(expression)  # which fails on an expression that Prometheus does not take
    assert mesh.firing() == []


async def test_a_killed_workers_stream_goes_on_unchanged_and_its_container_heals(
    mesh: Any, eventually: Eventually
) -> None:
    url = mesh.of("gateway")[0].url
    undisturbed = await complete(url, STORY, 160, Answer())
    assert undisturbed.whole == WHOLE
    async with asyncio.TaskGroup() as group:
        answer = Answer()
        group.create_task(complete(url, STORY, 160, answer))
        await eventually(lambda: len(answer.text) > 20, timeout_s=60)
        busy = await asyncio.to_thread(lambda: next(w for w in mesh.of("gpu_worker") if w.metric(RUNNING)))
        await asyncio.to_thread(busy.crash)
        assert not answer.done, "the answer ended before the kill"
    assert (answer.whole, answer.text) == (WHOLE, undisturbed.text)
    await eventually(busy.is_well, timeout_s=120, every_s=1)
    assert busy.inspect()["RestartCount"] == 1


@pytest.mark.parametrize("service", ["scheduler", "gpu_worker", "cache_service", "gateway"])
async def test_stopping_a_container_under_load_loses_no_answer(service: str, mesh: Any, eventually: Eventually) -> None:
    """Fault B21: readiness first, running answers end or go on elsewhere, exit code 0 before the kill timer."""
    gateways, stopped = mesh.of("gateway"), mesh.of(service)[0]
    answers = [Answer() for _ in range(STREAMS)]
    async with asyncio.TaskGroup() as group:
        for n, answer in enumerate(answers):
            group.create_task(complete(gateways[n % 2].url, f"{STORY} {n}", 24, answer))
        await eventually(lambda: sum(bool(answer.text) for answer in answers) >= 4, timeout_s=60)
        assert any(not answer.text for answer in answers), "none waited any more"
        await asyncio.to_thread(stopped.stop)
    assert [answer.whole for answer in answers] == [WHOLE] * STREAMS
    assert stopped.inspect()["State"]["ExitCode"] == 0


async def test_a_stopped_workers_long_answers_are_parked_and_go_on_elsewhere(mesh: Any, eventually: Eventually) -> None:
    gateways, stopped = mesh.of("gateway"), mesh.of("gpu_worker")[0]
    answers = [Answer() for _ in range(8)]
    async with asyncio.TaskGroup() as group:
        for n, answer in enumerate(answers):
            group.create_task(complete(gateways[n % 2].url, f"{STORY} {n}", 600, answer))
        await eventually(lambda: all(answer.text for answer in answers), timeout_s=60)
        assert stopped.metric(RUNNING), "the worker had something to give up"
        await asyncio.to_thread(stopped.stop)
        assert any(not answer.done for answer in answers), "they ended before the worker did"
    assert [answer.whole for answer in answers] == [WHOLE] * 8
    assert stopped.inspect()["State"]["ExitCode"] == 0


async def test_a_stopped_gateway_refuses_what_is_new_and_ends_what_is_too_long_in_band(
    mesh: Any, eventually: Eventually
) -> None:
    stopped = mesh.of("gateway")[0]
    url, answers = stopped.url, [Answer() for _ in range(3)]
    async with asyncio.TaskGroup() as group:
        for answer in answers:
            group.create_task(complete(url, STORY, 5000, answer))
        await eventually(lambda: all(answer.text for answer in answers), timeout_s=60)
        stopping = group.create_task(asyncio.to_thread(stopped.stop))
        async with httpx.AsyncClient(timeout=10) as client:

            async def is_refused() -> bool:
                refused = await client.post(f"{url}/v1/completions", json={"model": MODEL, "prompt": "x"})
                return refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1

            await eventually(is_refused)
            assert (await client.get(f"{url}/ready")).status_code == 503
        await stopping
    for answer in answers:
        assert answer.error is not None
        assert answer.error["message"]
        assert answer.done
    assert stopped.inspect()["State"]["ExitCode"] == 0


async def test_down_stops_everything_in_good_order_and_leaves_nothing(mesh: Any) -> None:
    """Idle services end at once: a `down` that takes a drain's time has waited for somebody who never stopped."""
    before = time.monotonic()
    mesh.stack.down()
    assert time.monotonic() - before < 30
    assert mesh.stack.left() == []
