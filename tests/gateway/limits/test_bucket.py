"""The bucket's rules, and that Redis runs the same ones."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import example, given, settings
from hypothesis import strategies as st

import gateway.limits
from gateway.limits.bucket import US, Bucket, Clock, Rules, give, take

RULES = Rules(capacity=100.0, refill_per_s=2.0)
S = US


def at(seconds: float, process: str = "p", wall_s: float | None = None, seen_s: float | None = None) -> Clock:
    wall = seconds if wall_s is None else wall_s
    return Clock(process, int(seconds * S), int(wall * S), -1 if seen_s is None else int(seen_s * S))


def test_a_bucket_starts_full_and_refills_by_time() -> None:
    bucket, wait_s = take(None, RULES, at(0), 100)
    assert (bucket.level, wait_s) == (0, 0)
    bucket, wait_s = take(bucket, RULES, at(10), 30)
    assert (bucket.level, wait_s) == (20, 5)
    assert take(bucket, RULES, at(15), 30) == (Bucket(0, "p", 15 * S, 15 * S), 0)


@given(level=st.floats(-100, 100), cost=st.floats(0, 100))
def test_the_wait_that_is_told_suffices(level: float, cost: float) -> None:
    bucket, wait_s = take(Bucket(level, "p", 0, 0), RULES, at(0), cost)
    if wait_s:
        assert take(bucket, RULES, at(wait_s + 0.01), cost)[1] == 0


def test_more_than_was_reserved_is_a_debt_of_at_most_one_capacity() -> None:
    assert give(Bucket(10, "p", 0, 0), RULES, at(0), -30).level == -20
    assert give(Bucket(10, "p", 0, 0), RULES, at(0), -1e9).level == -100
    assert give(Bucket(10, "p", 0, 0), RULES, at(0), 1e9).level == 100


@pytest.mark.parametrize("step_s", [-11, 3600])
def test_a_clock_step_has_no_effect_on_one_gateway(step_s: float) -> None:
    bucket, _ = take(None, RULES, at(0), 100)
    stepped, _ = take(bucket, RULES, at(1, wall_s=1 + step_s), 0)
    assert stepped.level == 2
    assert take(stepped, RULES, at(2, wall_s=2 + step_s), 0)[0].level == 4


def test_a_clock_step_lends_another_gateway_no_more_than_it_has_lived_through() -> None:
    emptied = take(None, RULES, at(0, "p"), 100)[0]
    forward, _ = take(emptied, RULES, at(501, "q", wall_s=3601, seen_s=499), 0)
    assert forward.level == 4
    back, _ = take(emptied, RULES, at(501, "q", wall_s=-11, seen_s=499), 0)
    assert back.level == 0
    # The next one counts from the stepped clock, so nobody is locked out.
    assert take(back, RULES, at(9, "p", wall_s=-10, seen_s=0), 0)[0].level == 2


@given(
    calls=st.lists(
        st.tuples(
            st.sampled_from(["take", "give"]),
            st.floats(-150, 150),
            st.sampled_from(["p", "q"]),
            st.integers(-3, 30),
            st.integers(-4000, 4000),
        ),
        max_size=20,
    )
)
@settings(deadline=None)
def test_level_stays_within_bounds_and_admits_no_more_than_capacity_and_refill(calls: list[Any]) -> None:
    bucket: Bucket | None = None
    taken, mono_s, wall_s = 0.0, 0, 0
    for operation, amount, process, passed_s, step_s in calls:
        mono_s, wall_s = mono_s + max(0, passed_s), wall_s + max(0, passed_s) + step_s
        clock = at(mono_s, process, wall_s=wall_s, seen_s=0)
        if operation == "take":
            bucket, wait_s = take(bucket, RULES, clock, max(0.0, amount))
            taken += 0 if wait_s else max(0.0, amount)
        else:
            bucket = give(bucket, RULES, clock, amount)
        assert -RULES.capacity <= bucket.level <= RULES.capacity
    only_takes = all(operation == "take" for operation, *_ in calls)
    one_process = len({process for _, _, process, *_ in calls}) <= 1
    if only_takes and one_process:
        assert taken <= RULES.capacity + mono_s * RULES.refill_per_s + 1e-6


steps = st.fixed_dictionaries(
    {
        "operation": st.sampled_from(["take", "give"]),
        "amount": st.floats(0, 150) | st.integers(0, 150).map(float),
        "process": st.sampled_from(["p", "q"]),
        "passed_us": st.integers(-(10**7), 10**8),
        "seen": st.booleans(),
        "clock_step_us": st.sampled_from([0, 0, 11 * S, -3600 * S, -30 * S]),
    }
)


@pytest.fixture(scope="module")
def server(valkey: str) -> Any:
    client = redis.Redis.from_url(valkey, decode_responses=True)
    yield client
    client.close()


def called(operation: str, amount: float, process: str, clock_step_us: int = 0) -> dict[str, Any]:
    return {
        "operation": operation,
        "amount": amount,
        "process": process,
        "passed_us": 7 * S,
        "seen": True,
        "clock_step_us": clock_step_us,
    }


@example(capacity=100.0, refill=2.0, sequence=[called("take", 90.0, "p"), called("take", 20.0, "q", -3600 * S)])
@example(capacity=100.0, refill=2.0, sequence=[called("take", 90.0, "p"), called("take", 20.0, "q", 11 * S)])
@example(capacity=100.0, refill=2.0, sequence=[called("take", 90.0, "p"), called("give", 20.0, "p", -3600 * S)])
@given(capacity=st.floats(1, 200), refill=st.floats(0.001, 1e4), sequence=st.lists(steps, max_size=8))
@settings(max_examples=80, deadline=None)
def test_redis_and_python_follow_the_same_rules(
    server: Any, capacity: float, refill: float, sequence: list[dict[str, Any]]
) -> None:
    script = server.register_script((Path(gateway.limits.__file__).with_name("bucket.lua")).read_text())
    rules, key, bucket, mono_us = Rules(capacity, refill), "shoal:limit:{same}", None, 10**12
    server.delete(key)
    for step in sequence:
        mono_us += step["passed_us"]
        seen_us = mono_us - 2_000_000 if step["seen"] else -1
        if bucket is not None and step["clock_step_us"]:
            # The server's clock cannot be moved here; moving the time that was written comes to the same.
            bucket = dataclasses.replace(bucket, wall_us=bucket.wall_us + step["clock_step_us"])
            server.hset(key, "wall_us", bucket.wall_us)
        numbers = [repr(step["amount"]), repr(capacity), repr(refill)]
        reply = script(keys=[key], args=[step["operation"], *numbers, step["process"], mono_us, seen_us])
        level, wait_s, wall_us = map(float, reply)
        clock = Clock(step["process"], mono_us, int(wall_us), seen_us)
        if step["operation"] == "take":
            bucket, expected_wait_s = take(bucket, rules, clock, step["amount"])
        else:
            bucket, expected_wait_s = give(bucket, rules, clock, step["amount"]), 0.0
        assert (level, wait_s) == (bucket.level, expected_wait_s)
    assert server.ttl(key) == (-1 if sequence else -2)
