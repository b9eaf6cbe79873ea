"""The breaker: what shuts it, who may ask meanwhile, and how it heals."""

from mesh.breaker import Breaker, BreakerPolicy

POLICY = BreakerPolicy(failures=3, open_s=1.0, open_most_s=8.0)


def test_a_few_failures_in_a_row_open_it_and_a_success_between_them_does_not() -> None:
    breaker = Breaker(POLICY)
    for _ in range(5):
        breaker.failed("get", 0)
        breaker.failed("get", 0)
        breaker.succeeded("get")
    assert breaker.closed
    for _ in range(3):
        breaker.failed("get", 0)
    assert not breaker.closed
    assert breaker.probe_at_s == 1.0


def test_success_at_one_kind_of_work_does_not_excuse_another() -> None:
    breaker = Breaker(POLICY)
    for _ in range(3):
        breaker.failed("get", 0)
        breaker.succeeded("match")
    assert not breaker.closed


def test_silence_opens_it_at_once() -> None:
    breaker = Breaker(POLICY)
    breaker.failed("get", 5, at_once=True)
    assert not breaker.closed
    assert breaker.probe_at_s == 6


def test_probes_become_seldom_up_to_a_limit_and_one_that_goes_well_closes_it() -> None:
    breaker = Breaker(POLICY)
    breaker.failed("get", 0, at_once=True)
    waits = []
    for _ in range(6):
        now = breaker.probe_at_s
        breaker.probed(False, now)
        waits.append(breaker.probe_at_s - now)
    assert waits == [2, 4, 8, 8, 8, 8]
    breaker.probed(True, 100)
    assert breaker.closed


def test_what_answers_probes_and_fails_at_work_is_left_alone_ever_longer() -> None:
    breaker = Breaker(POLICY)
    opened_for = []
    for now in (0, 100, 200):
        breaker.failed("get", now, at_once=True)
        opened_for.append(breaker.probe_at_s - now)
        breaker.probed(True, breaker.probe_at_s)
        breaker.succeeded("match")
    assert opened_for == [1, 2, 4]
    breaker.succeeded("get")
    breaker.failed("get", 300, at_once=True)
    assert breaker.probe_at_s == 301


def test_late_news_changes_nothing_while_it_is_open() -> None:
    breaker = Breaker(POLICY)
    breaker.failed("get", 0, at_once=True)
    breaker.failed("get", 0.5, at_once=True)
    breaker.succeeded("get")
    assert not breaker.closed
    assert breaker.probe_at_s == 1.0
