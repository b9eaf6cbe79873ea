"""The policy of what counts as an overdue step."""

import pytest

from gpu_worker.pulse import Pulse


def test_an_idle_engine_is_well_for_ever() -> None:
    pulse = Pulse(1.5)
    pulse.answer(10.0, more=False, median_step_s=0.01)
    assert pulse.well(1e9)


def test_work_without_a_step_is_overdue_after_the_least_silence() -> None:
    pulse = Pulse(1.5)
    pulse.owe(10.0)
    assert pulse.well(11.5)
    assert not pulse.well(11.6)
    assert pulse.overdue_for(13.5) == pytest.approx(2.0)


def test_slow_steps_earn_more_patience() -> None:
    pulse = Pulse(1.5)
    pulse.answer(10.0, more=True, median_step_s=0.5)
    assert pulse.well(19.9)
    assert not pulse.well(20.1)


def test_more_commands_do_not_renew_the_patience() -> None:
    pulse = Pulse(1.5)
    pulse.owe(10.0)
    pulse.owe(11.4)
    assert not pulse.well(11.6)


def test_a_step_makes_it_well_again_and_starts_the_wait_for_the_next() -> None:
    pulse = Pulse(1.5)
    pulse.owe(10.0)
    pulse.answer(20.0, more=True, median_step_s=0.01)
    assert pulse.well(21.5)
    assert not pulse.well(21.6)
