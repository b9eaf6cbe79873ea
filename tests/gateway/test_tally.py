"""Usage over attempts: counts are summed, and times are told of the attempts that could tell."""

from gateway.tally import Tally
from mesh.clients.attempt import Accepted, ChoiceEnd
from mesh.clients.outcomes import Reason
from mesh.clients.placement import Grant
from mesh.clients.usage import Usage


def grant(attempt: int) -> Grant:
    return Grant(
        worker_id=f"w{attempt}", address="127.0.0.1:1", attempt=attempt,
        waited_ms=0, queue_class="normal/S", ahead=0, reason="load", scheduler_id="s1",
    )  # fmt: skip


def end(reason: Reason, **usage: float) -> ChoiceEnd:
    return ChoiceEnd(0, reason, 9, Usage(**usage))


def test_a_moved_answer_tells_the_steps_of_all_attempts_and_the_median_of_the_longest() -> None:
    tally = Tally(5, [])
    tally.begin(grant(1))
    tally.accepted(Accepted({1: 16}, "int8", b"weights", 4))
    tally.ended(end(Reason.PARKED, steps=30, median_step_ms=7.0, max_step_ms=90.0, first_token_ms=50))
    tally.begin(grant(2))  # broke without a word
    tally.begin(grant(3))
    tally.accepted(Accepted({}, "int8", b"weights", 80))
    tally.ended(
        end(Reason.STOP, steps=10, median_step_ms=9.0, max_step_ms=20.0, first_token_ms=8, recomputed_tokens=35)
    )
    usage = tally.usage()
    assert (usage.steps, usage.median_step_ms, usage.max_step_ms) == (40, 7.0, 90.0)
    assert (usage.recomputed_tokens, usage.first_token_ms, usage.queue_ms) == (35, 50, 4)
    assert (usage.precision, usage.cached) == ("int8", {1: 16})


def test_nothing_was_used_before_a_worker_took_it() -> None:
    assert Tally(5, []).usage() == Usage()
