"""Prompts enter in pieces cut by time."""

from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.engine.api import TokensEvent
from gpu_worker.engine.pacing import LEAST_TOKENS, Pace


def settle(pace: Pace, seconds_per_token: float, steps: int = 30) -> float:
    """Seconds of the last of some full steps at a constant price."""
    duration_s = 0.0
    for _ in range(steps):
        duration_s = pace.budget * seconds_per_token
        pace.record(duration_s, pace.budget)
    return duration_s


@given(st.floats(0.002, 0.02))
def test_a_full_step_takes_about_as_long_as_it_should(seconds_per_token: float) -> None:
    assert 0.4 < settle(Pace(1024, 0.5), seconds_per_token) < 0.6


def test_a_fast_machine_computes_the_most_and_a_very_slow_one_the_least() -> None:
    fast, slow = Pace(256, 0.5), Pace(256, 0.5)
    settle(fast, 1e-5)
    settle(slow, 10.0)
    assert fast.budget == 256
    assert slow.budget == LEAST_TOKENS


def test_one_slow_step_shrinks_the_next_at_once_and_growth_at_most_doubles() -> None:
    pace = Pace(256, 0.5)
    settle(pace, 0.001)
    pace.record(5.0, 256)
    assert pace.budget == 26
    pace.record(0.001, 26)
    assert pace.budget == 52


def test_decodes_and_the_short_end_of_a_prompt_do_not_raise_it() -> None:
    pace = Pace(256, 0.5)
    before = pace.budget
    pace.record(0.05, 0)
    pace.record(0.001, 3)
    assert pace.budget == before


def test_short_prompts_pass_a_long_one_that_at_most_takes_twice_as_long(lab) -> None:
    """B12: one long prompt, then short ones without end; step counts, no clock."""
    engine = lab.engine(prefill_chunk=16)
    engine.submit(lab.plan("long", [3 + n % 90 for n in range(200)], max_tokens=1))
    engine.step()
    steps, first_token_at = 1, {}
    while "long" not in first_token_at:
        assert steps < 2 * 200 / 16 + 2
        short = f"short-{steps}"
        engine.submit(lab.plan(short, [5 + steps % 80, 7, 9, 11], max_tokens=1, cache_salt=short.encode()))
        for event in engine.step().events:
            if isinstance(event, TokensEvent):
                first_token_at[event.request_id] = steps
        steps += 1
    shorts = [at - int(name.partition("-")[2]) for name, at in first_token_at.items() if name != "long"]
    assert len(shorts) > 10
    assert max(shorts) <= 1, "a short prompt waited for the long one"
