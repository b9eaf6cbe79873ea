"""Which blocks are seen often enough to be stored. Pure."""

from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.cold.sightings import Sightings

ROOT = b"namespace"


def test_a_block_is_due_at_its_second_sight_and_from_then_on() -> None:
    sightings = Sightings(after=2)
    assert sightings.see(ROOT, [b"a", b"b"]) == []
    assert sightings.see(ROOT, [b"b", b"c"]) == [b"b"]
    assert sightings.see(ROOT, [b"a", b"b", b"c", b"d"]) == [b"a", b"b", b"c"]


def test_one_sight_is_enough_where_that_is_asked_for() -> None:
    assert Sightings(after=1).see(ROOT, [b"a", b"b"]) == [b"a", b"b"]


def test_three_are_needed_where_that_is_asked_for() -> None:
    sightings = Sightings(after=3)
    assert [sightings.see(ROOT, [b"a"]) for _ in range(3)] == [[], [], [b"a"]]


def test_a_chain_is_due_as_far_as_it_is_shared() -> None:
    sightings = Sightings(after=2)
    sightings.see(ROOT, [b"a", b"b", b"c", b"d"])
    assert sightings.see_chain(ROOT, [b"a", b"b", b"x", b"y"]) == [b"a", b"b"]


def test_parents_whose_first_sight_is_forgotten_go_with_a_child_that_is_due() -> None:
    sightings = Sightings(after=2, most=2)
    sightings.see(ROOT, [b"a", b"b", b"c"])  # a goes
    assert sightings.see_chain(ROOT, [b"a", b"b", b"c"]) == [b"a", b"b", b"c"]


def test_what_is_remembered_is_told_with_its_namespace_the_oldest_sight_first() -> None:
    sightings = Sightings(after=2)
    sightings.see(ROOT, [b"a", b"b"])
    sightings.see(b"other", [b"c"])
    sightings.see(ROOT, [b"a"])
    assert list(sightings) == [(ROOT, b"b"), (b"other", b"c"), (ROOT, b"a")]


@given(st.lists(st.lists(st.integers(0, 40), unique=True, max_size=12)), st.integers(1, 20))
def test_memory_is_bounded_and_no_key_is_due_before_it_was_seen_twice(sights: list[list[int]], most: int) -> None:
    sightings = Sightings(after=2, most=most)
    before: set[bytes] = set()
    for keys in ([bytes([number]) for number in numbers] for numbers in sights):
        due = sightings.see(ROOT, keys)
        assert set(due) <= before
        before.update(keys)
        assert len(sightings) <= most
