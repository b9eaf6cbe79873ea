"""Rates that placement can reckon with: what a queue of prefill takes, whatever sizes the steps had."""

import random

import pytest

from gpu_worker.engine.meters import Meters

FIXED_S, PER_TOKEN_S, FULL = 0.030, 0.0026, 256
FULL_RATE = FULL / (FIXED_S + FULL * PER_TOKEN_S)  # 367 tokens/s


def run(meters: Meters, steps: list[tuple[int, int]]) -> None:
    """Steps of (prefill, decode) tokens on an engine that takes the same time for each token."""
    for prefill, decode in steps:
        meters.record(FIXED_S + PER_TOKEN_S * (prefill + decode), prefill, decode)


def warmed_up() -> Meters:
    meters = Meters(FULL)
    meters.record(0.9, 8, 0)  # all that is made once is made here
    meters.record(0.2, 0, 1)
    return meters


def test_nothing_is_known_after_the_warm_up_whose_steps_are_like_no_others() -> None:
    meters = warmed_up()
    assert (meters.prefill_tokens_per_s, meters.decode_tokens_per_s, meters.steps) == (0, 0, 2)


@pytest.mark.parametrize("prompt", [12, 40, 256])
@pytest.mark.parametrize("decodes", [0, 1, 6])
def test_the_prefill_rate_is_a_full_steps_however_short_or_mixed_the_steps_were(prompt: int, decodes: int) -> None:
    meters = warmed_up()
    for _ in range(20):
        run(meters, [(prompt, decodes), (0, 1), (0, 3), (0, 6)])
    assert meters.prefill_tokens_per_s == pytest.approx(FULL_RATE, rel=0.05)


def test_the_rate_is_known_from_the_first_prefill_on_and_follows_a_slower_machine() -> None:
    meters = warmed_up()
    run(meters, [(200, 0)])
    assert meters.prefill_tokens_per_s == pytest.approx(200 / (FIXED_S + 200 * PER_TOKEN_S))
    for _ in range(60):
        meters.record(2 * (FIXED_S + PER_TOKEN_S * 200), 200, 0)
        meters.record(2 * (FIXED_S + PER_TOKEN_S), 0, 1)
    assert meters.prefill_tokens_per_s == pytest.approx(FULL_RATE / 2, rel=0.05)


def test_steps_without_order_never_give_less_than_was_measured_nor_more_than_a_full_step_in_the_time_of_a_short() -> (
    None
):
    rng = random.Random(1)
    for _ in range(200):
        meters = warmed_up()
        steps = [(rng.randint(2, FULL), rng.randint(0, 8), rng.uniform(0.001, 1.0)) for _ in range(5)]
        for prefill, decode, seconds in steps:
            meters.record(seconds, prefill, decode)
            meters.record(rng.uniform(0.001, 1.0), 0, decode + 1)
        tokens, seconds = sum(p + d for p, d, _ in steps), sum(s for *_, s in steps)
        full = max(FULL * len(steps), tokens)
        assert tokens / seconds * 0.999 <= meters.prefill_tokens_per_s <= full / seconds * 1.001
