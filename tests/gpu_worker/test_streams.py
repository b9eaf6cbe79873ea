"""What waits for a client: joined, bounded, in order, ending in an error where there was one."""

import asyncio

import pytest

from gpu_worker.engine.api import AcceptedEvent, ChoicePlan, FinishedEvent, Plan, Reason, TokensEvent, Usage
from gpu_worker.streams import EventStream
from mesh.errors import Internal, Superseded
from mesh.sampling import Sampling


def stream(choices: int = 1, interval_s: float = 0.0) -> EventStream:
    plans = [ChoicePlan(index) for index in range(choices)]
    sampling = Sampling(max_tokens=9, seed=1)
    return EventStream(Plan(request_id="r", attempt=1, prompt_ids=[1], choices=plans, sampling=sampling), interval_s)


def tokens(choice: int, position: int, *ids: int) -> TokensEvent:
    return TokensEvent("r", 1, choice, position, list(ids))


def finished(choice: int, last: bool) -> FinishedEvent:
    usage = Usage(prompt_tokens=1, completion_tokens=1)
    return FinishedEvent("r", 1, choice, Reason.STOP, 1, usage, last)


async def test_tokens_that_nobody_took_are_joined_per_choice() -> None:
    events = stream(2)
    for at in range(50):
        events.put(tokens(0, at, at))
        events.put(tokens(1, at, 100 + at))
    taken = await events.take(1)
    assert [(event.choice, event.position, len(event.ids)) for event in taken] == [(0, 0, 50), (1, 0, 50)]


async def test_tokens_go_on_where_the_taken_ones_ended() -> None:
    events = stream()
    events.put(tokens(0, 0, 5))
    await events.take(1)
    events.put(tokens(0, 1, 6))
    assert [event.position for event in await events.take(1)] == [1]


async def test_acceptance_comes_first_and_each_end_after_its_tokens() -> None:
    events = stream(2)
    events.put(AcceptedEvent("r", 1, {}, 3))
    events.put(tokens(0, 0, 5))
    events.put(finished(0, last=False))
    events.put(tokens(1, 0, 6))
    events.put(finished(1, last=True))
    kinds = [(type(event).__name__, getattr(event, "choice", None)) for event in await events.take(1)]
    assert kinds[0] == ("AcceptedEvent", None)
    for choice in (0, 1):
        assert kinds.index(("TokensEvent", choice)) < kinds.index(("FinishedEvent", choice))
    assert events.drained


async def test_silence_returns_nothing_and_ends_nothing() -> None:
    events = stream()
    assert await events.take(0.01) == []
    assert not events.drained


async def test_what_was_said_before_a_failure_is_still_read() -> None:
    events = stream()
    events.put(tokens(0, 0, 5))
    events.fail(Superseded("a newer attempt"))
    events.fail(Internal("later"))
    assert len(await events.take(1)) == 1
    with pytest.raises(Superseded):
        await events.take(1)
    assert events.open_choices == frozenset()


async def test_tokens_within_the_interval_come_together_and_after_it_by_themselves() -> None:
    events, loop = stream(interval_s=0.2), asyncio.get_running_loop()
    events.put(tokens(0, 0, 5))
    began_s = loop.time()
    assert [event.ids for event in await events.take(1)] == [[5]], "the first waits for nothing"
    assert loop.time() - began_s < 0.1
    events.put(tokens(0, 1, 6))
    assert await events.take(0) == []
    events.put(tokens(0, 2, 7))
    assert [event.ids for event in await events.take(5)] == [[6, 7]]
    assert 0.19 < loop.time() - began_s < 4


async def test_neither_an_end_nor_an_error_waits_for_the_interval() -> None:
    ending, failing = stream(interval_s=60), stream(interval_s=60)
    for events in (ending, failing):
        events.put(tokens(0, 0, 5))
        await events.take(1)
        events.put(tokens(0, 1, 6))
    ending.put(finished(0, last=True))
    assert len(await ending.take(1)) == 2
    assert ending.drained
    failing.fail(Internal("lost"))
    assert len(await failing.take(1)) == 1
    with pytest.raises(Internal):
        await failing.take(1)
