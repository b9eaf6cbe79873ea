"""Kernel time by part: told of few steps, true of those, and free for all others."""

import time

import pytest
import torch

from gpu_worker.engine.api import Parts
from gpu_worker.engine.runner import TIMED_EVERY
from gpu_worker.models.watch import Part, Watch


@pytest.fixture(params=["torch", "simulated"])
def lab(request):
    return request.getfixturevalue(f"{request.param}_lab")


def seconds(parts: Parts) -> list[float]:
    return [parts.attention_s, parts.feed_forward_s, parts.sampling_s, parts.other_s]


def test_one_step_in_so_many_says_where_its_time_went(lab, answers):
    engine = lab.engine(simulated_step_ms=0.1)
    engine.submit(lab.plan(max_tokens=2 * TIMED_EVERY + 5))
    steps = lab.finish(engine, answers).steps
    timed = [step for step in steps if step.parts is not None]
    assert len(timed) == 2
    for step in timed:
        assert all(part >= 0 for part in seconds(step.parts))
        assert 0 < sum(seconds(step.parts)) <= step.duration_ms / 1000 * 1.01


def test_a_real_step_spends_time_in_every_part(torch_lab, answers):
    engine = torch_lab.engine()
    engine.submit(torch_lab.plan(max_tokens=TIMED_EVERY + 5))
    (parts,) = [step.parts for step in torch_lab.finish(engine, answers).steps if step.parts is not None]
    assert min(seconds(parts)) > 0


def test_an_idle_step_repeats_no_parts(lab, answers):
    engine = lab.engine(simulated_step_ms=0.1)
    engine.submit(lab.plan(max_tokens=TIMED_EVERY))
    assert lab.finish(engine, answers).steps[-1].parts is not None
    assert engine.step().parts is None


def test_time_is_booked_to_the_part_that_took_it_after_the_device_has_settled():
    now, log = [0.0], []

    def settle() -> None:
        log.append(now[0])
        now[0] += 1.0  # what the device still had to do

    watch = Watch(settle, lambda: now[0])
    for part, took in ((Part.OTHER, 1.0), (Part.ATTENTION, 2.0), (Part.ATTENTION, 3.0), (Part.SAMPLING, 0.5)):
        now[0] += took
        watch.lap(part)
    assert watch.seconds == [7.0, 0.0, 1.5, 2.0]
    assert len(log) == 4


def test_timing_slows_steps_by_less_than_a_hundredth(torch_lab):
    """What a timed step pays (laps, on a model of 30 layers), over all steps, against the shortest step there is."""
    watch = Watch(lambda: None)
    laps, rounds = 2 * 30 + 2, 200
    best_s = min(_seconds(watch, laps * rounds) for _ in range(5)) / rounds
    engine = torch_lab.engine()
    engine.submit(torch_lab.plan(max_tokens=100))
    with torch.inference_mode():
        step_s = min(engine.step().duration_ms for _ in range(100)) / 1000
    assert best_s / TIMED_EVERY < step_s / 100


def _seconds(watch: Watch, laps: int) -> float:
    began = time.perf_counter()
    for _ in range(laps):
        watch.lap(Part.ATTENTION)
    return time.perf_counter() - began
