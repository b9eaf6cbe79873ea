"""What a request is told of the steps that carried it."""

import pytest

from gpu_worker.engine.step_times import REMEMBERED_STEPS, Carried, StepTimes


def times(*durations_ms: float) -> StepTimes:
    steps = StepTimes()
    for duration_ms in durations_ms:
        steps.record(duration_ms)
    return steps


def test_steps_count_from_the_first_that_held_it_to_the_one_under_way():
    steps = times(100, 100, 3, 5)
    assert steps.since(2, None) == Carried(2, 4.0, 5.0)
    assert steps.since(2, 40.0) == Carried(3, 5.0, 40.0)


def test_no_step_takes_no_time():
    assert times(7).since(1, None) == Carried(0, 0.0, 0.0)


def test_of_a_very_long_answer_all_steps_count_and_the_newest_tell_the_times():
    steps = times(500.0, *[2.0] * (REMEMBERED_STEPS - 1), 4.0)
    assert steps.since(0, None) == Carried(REMEMBERED_STEPS + 1, 2.0, 4.0)


@pytest.fixture(params=["torch", "simulated"])
def lab(request):
    return request.getfixturevalue(f"{request.param}_lab")


def test_an_answer_is_told_as_many_steps_as_it_took(lab, answers):
    engine = lab.engine(prefill_chunk=16)
    lab.answer(engine, lab.plan("before"))
    engine.submit(lab.plan("r", [5] * 40, max_tokens=6))
    lab.finish(engine, answers)
    took = [step.duration_ms for step in answers.steps]
    usage = answers.ends["r", 0].usage
    assert usage.steps == len(took) == 3 + 5  # three pieces of the prompt, the last with the first token
    assert max(took[:-1]) - 0.01 <= usage.max_step_ms <= max(took) + 0.01
    assert 0 < usage.median_step_ms <= usage.max_step_ms


def test_a_request_that_ends_before_any_step_was_in_none(lab, answers):
    engine = lab.engine()
    engine.submit(lab.plan("parked"))
    engine.park("parked", 1)
    lab.finish(engine, answers)
    usage = answers.ends["parked", 0].usage
    assert (usage.steps, usage.median_step_ms, usage.max_step_ms) == (0, 0.0, 0.0)


def test_a_request_parked_between_steps_is_told_those_that_held_it(lab, answers):
    engine = lab.engine()
    engine.submit(lab.plan("parked", max_tokens=50))
    for _ in range(4):
        lab.step(engine, answers)
    engine.park("parked", 1)
    lab.finish(engine, answers)
    assert answers.ends["parked", 0].usage.steps == 4
