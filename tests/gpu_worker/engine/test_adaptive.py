"""The batch limit follows the load."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.engine.adaptive import HOLD_S, BatchLimit


def after(limit: BatchLimit, load: float, seconds: float, now_s: float = 100.0, every_s: float = 0.05) -> int:
    """The limit after so long at a load."""
    for at in range(round(seconds / every_s) + 1):
        limit.record(load * limit.target_s, now_s + at * every_s)
    return limit.limit


def test_it_begins_at_the_top_and_shrinks_by_steps_of_seven_tenths_while_steps_are_too_long() -> None:
    limit = BatchLimit(16, 64, 0.1)
    seen = [after(limit, 0.9, HOLD_S, now_s=100 + HOLD_S * 1.05 * n) for n in range(6)]
    assert seen == [45, 31, 22, 16, 16, 16]


def test_little_load_makes_it_grow_by_half_up_to_the_top() -> None:
    limit = BatchLimit(16, 64, 0.1)
    assert after(limit, 0.9, 10) == 16
    seen = [after(limit, 0.1, HOLD_S, now_s=200 + HOLD_S * 1.05 * n) for n in range(5)]
    assert seen == [24, 36, 54, 64, 64]


@given(st.floats(0.301, 0.799))
def test_between_thirty_and_eighty_per_cent_it_stays(load: float) -> None:
    limit = BatchLimit(16, 64, 0.1)
    after(limit, 0.9, HOLD_S)
    assert after(limit, load, 60, now_s=200) == 45


@pytest.mark.parametrize("load", [0.1, 0.9])
def test_what_does_not_last_changes_nothing(load: float) -> None:
    limit = BatchLimit(16, 64, 0.1)
    after(limit, 0.9, HOLD_S)
    for n in range(50):
        after(limit, load, 0.8 * HOLD_S, now_s=200 + 2 * n)
        after(limit, 0.5, 0.1, now_s=201 + 2 * n)
    assert limit.limit == 45


@given(st.lists(st.floats(0, 3), max_size=60), st.integers(1, 20), st.integers(0, 40))
def test_it_never_leaves_its_range(loads: list[float], fewest: int, more: int) -> None:
    limit = BatchLimit(fewest, fewest + more, 0.1)
    for n, load in enumerate(loads):
        assert fewest <= after(limit, load, 2, now_s=3.0 * n, every_s=0.5) <= fewest + more


def test_running_answers_outlive_a_limit_that_shrinks(lab, answers) -> None:
    engine = lab.engine(max_sequences=32, itl_target_ms=0.001)
    for n in range(32):
        engine.submit(lab.plan(f"r{n}", [5 + n, 6, 7], max_tokens=30))
    while lab.step(engine, answers).load.running_sequences < 32:
        pass
    engine._schedule._batch.limit = 16
    running = lab.step(engine, answers).load.running_sequences
    assert running == 32
    assert len(lab.finish(engine, answers).ends) == 32
