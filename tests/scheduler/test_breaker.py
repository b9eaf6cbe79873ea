"""A worker's breaker opens on failures in a row, probes with one request, and heals."""

from scheduler.breaker import Breaker, BreakerPolicy, State

POLICY = BreakerPolicy(failures=2, open_s=1, open_most_s=3)


def opened(now: float = 0) -> Breaker:
    breaker = Breaker(POLICY)
    breaker.failed(1, now)
    breaker.failed(2, now)
    return breaker


def test_it_opens_after_failures_in_a_row_and_a_success_starts_the_count_again() -> None:
    breaker = Breaker(POLICY)
    breaker.failed(1, 0)
    breaker.succeeded(2)
    breaker.failed(3, 0)
    assert breaker.allows(0)
    breaker.failed(4, 0)
    assert not breaker.allows(0.9)


def test_half_open_lets_one_probe_through_at_a_time() -> None:
    breaker = opened()
    assert breaker.allows(1)
    breaker.granted(7, 1)
    assert not breaker.allows(1)
    breaker.left(7)
    assert breaker.allows(1)


def test_a_probe_that_succeeds_closes_it() -> None:
    breaker = opened()
    breaker.allows(1)
    breaker.granted(7, 1)
    breaker.succeeded(7)
    assert breaker.state is State.CLOSED


def test_a_probe_that_runs_for_long_enough_closes_it_and_one_more_failure_opens_it() -> None:
    breaker = opened()
    breaker.allows(1)
    breaker.granted(7, 1)
    assert not breaker.allows(2.9)
    assert breaker.allows(3)
    assert breaker.state is State.CLOSED
    breaker.failed(8, 3)
    assert not breaker.allows(3.9)


def test_each_probe_that_fails_doubles_the_open_time_up_to_its_limit() -> None:
    breaker, now = opened(), 1.0
    for open_s in (2, 3, 3):
        assert breaker.allows(now)
        breaker.granted(7, 1)
        breaker.failed(7, now)
        assert not breaker.allows(now + open_s - 0.1)
        now += open_s


def test_late_news_of_older_requests_does_not_lengthen_the_open_time() -> None:
    breaker = opened()
    breaker.failed(3, 0.9)
    assert breaker.allows(1)
