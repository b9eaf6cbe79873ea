"""Attempts without a lease are voted out after a while, and the vote is taken back in time."""

from scheduler.strays import Strays

A, B = ("a", 1), ("b", 1)


def test_an_attempt_is_voted_out_only_after_the_whole_time() -> None:
    strays = Strays(after_s=10)
    assert strays.seen({A}, 1, now=0) is None
    assert strays.seen({A, B}, 1, now=9) is None
    assert strays.seen({A, B}, 1, now=10) == (1, {A})
    assert strays.seen({A, B}, 1, now=11) is None
    assert strays.seen({A, B}, 1, now=19) == (1, {A, B})


def test_a_lease_that_appears_takes_the_vote_back() -> None:
    strays = Strays(after_s=10)
    strays.seen({A}, 1, now=0)
    strays.seen({A}, 1, now=10)
    assert strays.seen(set(), 1, now=11) == (1, frozenset())
    assert strays.seen({A}, 1, now=12) is None


def test_a_new_epoch_starts_the_time_again() -> None:
    strays = Strays(after_s=10)
    strays.seen({A}, 1, now=0)
    assert strays.seen({A}, 1, now=10) == (1, {A})
    assert strays.seen({A}, 2, now=11) is None
    assert len(strays) == 0
    assert strays.seen({A}, 2, now=20.9) is None
    assert strays.seen({A}, 2, now=21) == (2, {A})
