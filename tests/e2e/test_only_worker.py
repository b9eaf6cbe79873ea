"""A mesh of one worker, whose engine is killed or stands still in mid-stream: every answer goes on when it is back."""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]
Eventually = Callable[..., Awaitable[object]]
PROMPTS = ["Tell of a shoal of fish.", "Count upwards from one.", "What is a current?"]
LENGTH = {"max_tokens": 120, "ignore_eos": True}
GREEDY = [{"prompt": prompt, **LENGTH} for prompt in PROMPTS]
DRAWN = [{"prompt": prompt, "temperature": 0.9, "seed": seed, **LENGTH} for seed, prompt in enumerate(PROMPTS)]
ASKED = [*GREEDY, *DRAWN]


@pytest.fixture(scope="module")
def alone(start_shared_mesh: Callable[..., Any]) -> Any:
    """One worker with the real model."""
    return start_shared_mesh()


async def test_answers_whose_only_worker_is_killed_go_on_when_it_is_started_again(
    alone: Any, chat: Callable[..., Any], eventually: Eventually
) -> None:
    async with same_as_undisturbed(alone, chat, eventually) as engine:
        engine.kill()
    assert alone.process("worker-0").restarts == 1


async def test_answers_whose_only_worker_stands_still_for_four_seconds_go_on_there(
    alone: Any, chat: Callable[..., Any], eventually: Eventually
) -> None:
    restarts = alone.process("worker-0").restarts
    async with same_as_undisturbed(alone, chat, eventually) as engine:
        engine.send_signal(signal.SIGSTOP)
        await asyncio.sleep(4)  # the fault itself
        engine.send_signal(signal.SIGCONT)
    assert alone.process("worker-0").restarts == restarts


@asynccontextmanager
async def same_as_undisturbed(mesh: Any, chat: Any, eventually: Eventually) -> AsyncIterator[psutil.Process]:
    """Around what is done to the engine with all answers under way: their texts and usage must stay as they are."""
    await eventually(mesh.is_ready, timeout_s=60)
    undisturbed = await asyncio.gather(*(chat(mesh, **body) for body in ASKED))
    begun = [asyncio.Event() for _ in ASKED]
    async with asyncio.TaskGroup() as group:
        answers = [
            group.create_task(chat(mesh, on_text=lambda _, has=has: has.set(), **body))
            for body, has in zip(ASKED, begun, strict=True)
        ]
        await asyncio.gather(*(has.wait() for has in begun))
        assert not any(answer.done() for answer in answers), "an answer ended too soon"
        yield engine_of(mesh)
    for answer, meant in zip((task.result() for task in answers), undisturbed, strict=True):
        assert (answer.error, answer.finish, answer.done) == (None, "length", True)
        assert answer.text == meant.text
        assert answer.usage["completion_tokens"] == meant.usage["completion_tokens"]
    await eventually(mesh.is_idle)


def engine_of(mesh: Any) -> psutil.Process:
    """The process beside the worker's own that computes."""
    children = psutil.Process(mesh.process("worker-0").pid).children()
    [engine] = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
    return engine
