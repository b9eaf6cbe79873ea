"""What a step costs beside its kernels: on two cores, a millisecond of it is a twentieth of a step of 32 choices."""

import time

import pytest

from gpu_worker.engine.messages import StepDone, encode

STEPS = 150


@pytest.mark.parametrize(("choices", "most_ms"), [(1, 0.2), (32, 1.0)])
def test_a_step_that_computes_nothing_takes_next_to_nothing(simulated_lab, choices, most_ms):
    """The best of many steps, so that neighbours on the machine do not count. A quiet one has a third of this."""
    engine = simulated_lab.engine(blocks=4096, max_sequences=64)
    for index in range(choices):
        engine.submit(simulated_lab.plan(f"r{index}", [5 + index] * 20, max_tokens=220))
    taken_s = []
    for _ in range(STEPS):
        began_s = time.perf_counter()
        result = engine.step()
        encode(StepDone(result))
        if len(result.events) == choices:
            taken_s.append(time.perf_counter() - began_s)
    assert len(taken_s) > STEPS / 2
    assert min(taken_s) * 1000 < most_ms
