"""The order of one line: priority, fairness between tenants, slack, and the bound on every wait."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.demand import Pins, Priority, Size, class_name
from scheduler.fairness import Shape, Waiting
from scheduler.queue import Line, QueuePolicy

POLICY = QueuePolicy()
NOBODY_BLOCKED = lambda waiting: False  # noqa: E731
SHAPE = Shape(Pins("tiny"))
numbers = itertools.count()


def waiting(
    tenant: str = "a",
    priority: Priority = Priority.NORMAL,
    cost: float = 100,
    arrived_s: float = 0,
    size: Size = Size.S,
) -> Waiting:
    return Waiting(
        next(numbers),
        tenant,
        priority,
        size,
        cost,
        arrived_s,
        arrived_s + POLICY.wait_target_s[size],
        arrived_s + POLICY.patience_s[priority],
        blocks=1,
        span_tokens=16,
        shape=SHAPE,
    )


def take_next(line: Line, now: float) -> Waiting:
    picked = line.pick(now, NOBODY_BLOCKED)
    assert picked is not None
    line.take(picked, now)
    return picked


def line_of(*entries: Waiting) -> Line:
    line = Line(POLICY)
    for entry in entries:
        line.add(entry)
    return line


def test_a_higher_priority_goes_first_whenever_it_arrived() -> None:
    batch, normal, high = (waiting(priority=p, arrived_s=0.1 * -p) for p in reversed(Priority))
    line = line_of(batch, normal, high)
    assert [take_next(line, 0.3) for _ in range(3)] == [high, normal, batch]


def test_least_slack_goes_first_among_a_tenants_requests() -> None:
    large_old = waiting(size=Size.L, arrived_s=0)  # due at 3.0
    small_new = waiting(size=Size.S, arrived_s=2.7)  # due at 2.9
    small_newer = waiting(size=Size.S, arrived_s=2.9)  # due at 3.1
    line = line_of(small_newer, large_old, small_new)
    assert [take_next(line, 3) for _ in range(3)] == [small_new, large_old, small_newer]


def test_a_tenant_with_many_requests_does_not_delay_one_with_few() -> None:
    flood = [waiting("flood", cost=1_000) for _ in range(100)]
    line = line_of(*flood)
    for _ in range(10):
        take_next(line, 0)
    modest = waiting("modest", cost=1_000)
    line.add(modest)
    assert modest in [take_next(line, 0) for _ in range(4)]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 6_000)), min_size=60, max_size=120),
    st.integers(1, 40),
)
def test_tenants_that_keep_waiting_get_equal_work(arrivals: list[tuple[str, int]], grants: int) -> None:
    line = Line(POLICY)
    entries = [waiting(tenant, cost=cost) for tenant, cost in arrivals]
    for entry in entries:
        line.add(entry)
    left = Counter(entry.tenant for entry in entries)
    served: Counter[str] = Counter({tenant: 0 for tenant in left})
    for _ in range(grants):
        if min(left.values()) <= 1:
            break
        entry = take_next(line, 0)
        left[entry.tenant] -= 1
        served[entry.tenant] += int(entry.cost)
    # Deficit round robin's bound: a quantum and the dearest request on either side.
    assert max(served.values()) - min(served.values()) <= 2 * (POLICY.quantum_tokens + 6_000)


def test_a_tenant_that_was_idle_has_saved_nothing_up() -> None:
    line = line_of(*(waiting("busy", cost=1_000) for _ in range(50)))
    line.add(waiting("idle", cost=10))
    for _ in range(20):
        take_next(line, 0)
    for _ in range(20):
        line.add(waiting("idle", cost=1_000))
    first = Counter(take_next(line, 0).tenant for _ in range(10))
    assert first["busy"] >= 4


def wait_under_flood(policy: QueuePolicy, victim: Waiting, capacity: float, until_s: float) -> float | None:
    """Seconds until `victim` is granted while high-priority requests arrive faster than the line's capacity."""
    line = Line(policy)
    line.add(victim)
    now, arrived = 0.0, 0.0
    while now < until_s:
        while arrived <= now:
            line.add(waiting("flood", Priority.HIGH, cost=200, arrived_s=arrived))
            arrived += 200 / (1.05 * capacity)
        entry = take_next(line, now)
        if entry is victim:
            return now
        now += entry.cost / capacity
    return None


@pytest.mark.parametrize(("priority", "cost"), [(Priority.BATCH, 30_000), (Priority.NORMAL, 500), (Priority.BATCH, 50)])
def test_every_wait_is_bounded_under_an_endless_flow_of_high_priority(priority: Priority, cost: float) -> None:
    capacity = 1_000.0
    victim = waiting("cold", priority, cost=cost, size=Size.L)
    patience = POLICY.patience_s[priority]
    # A: what has an earlier arrival + patience, namely the flow of all but the last (patience - high's) seconds.
    ahead = 1.05 * capacity * max(0.0, patience - POLICY.patience_s[Priority.HIGH])
    bound = patience + (ahead + 2 * max(cost, 200)) / (POLICY.overtake_share * capacity)
    waited = wait_under_flood(POLICY, victim, capacity, until_s=bound)
    assert waited is not None, f"not granted within {bound} s"


def test_without_patience_the_same_request_would_starve() -> None:
    endless = replace(POLICY, patience_s=(1e9, 1e9, 1e9))
    victim = replace(waiting("cold", Priority.BATCH), overdue_s=1e9)
    assert wait_under_flood(endless, victim, 1_000, until_s=400) is None


def test_old_batch_work_leaves_high_priority_its_share() -> None:
    line = line_of(*(waiting("old", Priority.BATCH, cost=100, arrived_s=-1_000) for _ in range(400)))
    for _ in range(400):
        line.add(waiting("new", Priority.HIGH, cost=100))
    first = Counter(take_next(line, 0.1).tenant for _ in range(200))
    assert first["new"] >= 0.74 * 200
    assert first["old"] >= 0.24 * 200


def test_a_requeued_request_keeps_its_age() -> None:
    old, new = waiting(arrived_s=-3), waiting(arrived_s=0)
    line = line_of(old)
    assert take_next(line, 0) is old
    line.add(new)
    line.add(old)
    assert take_next(line, 0) is old


def test_a_blocked_request_is_passed_over_and_keeps_its_place() -> None:
    first, second = waiting(arrived_s=0), waiting(arrived_s=1)
    line = line_of(first, second)
    passed = line.pick(1, lambda w: w is first)
    assert passed is second
    line.take(second, 1)
    assert take_next(line, 1) is first
    assert line.pick(1, NOBODY_BLOCKED) is None


def test_ahead_counts_higher_priorities_and_less_slack() -> None:
    line = line_of(waiting(priority=Priority.HIGH, arrived_s=9), waiting(arrived_s=0), waiting("b", arrived_s=1))
    line.add(waiting(priority=Priority.BATCH, arrived_s=0))
    assert line.add(waiting("c", arrived_s=0.5)) == 2


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(Priority), st.integers(1, 50_000)), max_size=60))
def test_everything_added_is_taken_once(entries: list[tuple[str, Priority, int]]) -> None:
    added = [waiting(t, p, cost=c, arrived_s=-i) for i, (t, p, c) in enumerate(entries)]
    line = line_of(*added)
    taken = [take_next(line, 5.0) for _ in added]
    assert sorted(w.lease_id for w in taken) == sorted(w.lease_id for w in added)
    assert len(line) == 0
    assert line.pick(5.0, NOBODY_BLOCKED) is None


def test_limits_count_the_line_its_batch_and_each_tenant() -> None:
    policy = QueuePolicy(limit=4, batch_limit=1, tenant_limit=2)
    line = Line(policy)
    line.add(waiting("a", Priority.BATCH))
    assert line.full_for("b", Priority.BATCH)
    assert not line.full_for("b", Priority.NORMAL)
    line.add(waiting("a"))
    assert line.full_for("a", Priority.HIGH)
    line.add(waiting("b"))
    line.add(waiting("c"))
    assert line.full_for("d", Priority.HIGH)


def test_turnover_tells_how_long_the_present_queue_takes() -> None:
    line = line_of(*(waiting(arrived_s=0) for _ in range(100)))
    for step in range(1, 81):
        take_next(line, step * 0.5)
    assert line.turnover_s() == pytest.approx(20 * 0.5, rel=0.05)


def test_sizes_follow_the_predicted_cost(make) -> None:
    policy = QueuePolicy(size_bounds=(100, 1_000))
    small = policy.waiting(1, make.demand(prompt_tokens=10, expected_tokens=5), 0)
    large = policy.waiting(2, make.demand(prompt_tokens=10, expected_tokens=32, choices=8), 0)
    assert class_name(small.priority, small.size) == "normal/S"
    assert class_name(large.priority, large.size) == "normal/L"
