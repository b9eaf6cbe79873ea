"""Fetch or recompute, by what was measured."""

import pytest

from gpu_worker.cold.known import Known
from gpu_worker.cold.policy import FORGET_S, ColdLimits, FetchRate, Missing, allowed_s, worth_fetching

LIMITS = ColdLimits(share=0.5, most_s=1.0, least_blocks=4)
# 64 blocks of 720 KiB, a second to compute.
MISSING = Missing(blocks=64, block_bytes=737_280, prefill_tokens_per_s=1024.0)


def measured(first_s: float, bytes_per_s: float, now: float = 0.0) -> FetchRate:
    rate = FetchRate()
    rate.record(first_s, 1.0, round(bytes_per_s), now)
    return rate


def test_a_fetch_that_takes_less_than_its_share_of_computing_is_worth_while() -> None:
    assert worth_fetching(MISSING, measured(0.01, 200e6), LIMITS, now=1.0)
    assert not worth_fetching(MISSING, measured(0.01, 80e6), LIMITS, now=1.0)
    assert not worth_fetching(MISSING, measured(0.6, 1e9), LIMITS, now=1.0)


def test_what_is_not_known_is_tried() -> None:
    unknown = Missing(blocks=64, block_bytes=737_280, prefill_tokens_per_s=0.0)
    assert worth_fetching(MISSING, FetchRate(), LIMITS, now=0.0)
    assert worth_fetching(unknown, FetchRate(), LIMITS, now=0.0)
    assert worth_fetching(unknown, measured(0.01, 80e6), LIMITS, now=1.0)


def test_a_cache_that_was_slow_once_is_tried_again_later() -> None:
    slow = measured(5.0, 1e6)
    assert not worth_fetching(MISSING, slow, LIMITS, now=FORGET_S - 1)
    assert worth_fetching(MISSING, slow, LIMITS, now=FORGET_S + 1)
    slow.record(0.01, 1.0, round(500e6), now=FORGET_S + 2)
    assert slow.seconds(0, FORGET_S + 2) == pytest.approx(0.01)


def test_few_blocks_are_not_worth_asking_for() -> None:
    few = Missing(blocks=3, block_bytes=737_280, prefill_tokens_per_s=1.0)
    assert not worth_fetching(few, FetchRate(), LIMITS, now=0.0)


def test_the_time_allowed_is_a_share_of_computing_or_a_stated_most() -> None:
    assert allowed_s(MISSING, LIMITS) == pytest.approx(0.5)
    assert allowed_s(Missing(64, 737_280, 0.0), LIMITS) == 1.0


def test_a_rate_follows_what_is_measured() -> None:
    rate = measured(0.1, 100e6)
    for second in range(1, 30):
        rate.record(0.2, 1.0, round(400e6), now=float(second))
    assert rate.seconds(round(400e6), 29.0) == pytest.approx(1.2, rel=0.01)


def test_known_keys_are_bounded_and_the_oldest_go_first() -> None:
    known = Known(most=3)
    known.add([b"a", b"b", b"c"])
    known.add([b"a", b"d"])
    assert [key in known for key in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
    known.discard([b"a", b"x"])
    assert b"a" not in known
