"""What may be asked of scaling, and what it comes to."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.cli.roles import FEWEST, MOST, STOP_ORDER, BadScale, Change, changes, parse


def test_a_request_names_roles_and_counts() -> None:
    assert parse(["worker=3", "cache=0"]) == {"worker": 3, "cache": 0}


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "nothing to scale"),
        (["worker"], "'worker' is not ROLE=COUNT"),
        (["worker=three"], "'three' is not a count"),
        (["worker=-1"], "'-1' is not a count"),
        (["worker=²"], "'²' is not a count"),
        (["worker="], "'' is not a count"),
        (["worker=" + "9" * 5000], "is not a count"),
        (["worker=1", "worker=2"], "worker is given twice"),
        (["wroker=2"], "'wroker' cannot be scaled; roles are gateway, scheduler, worker, cache"),
        (["valkey=2"], "'valkey' cannot be scaled"),
        (["gateway=0"], "at least 1"),
        (["worker=65"], "at most 64"),
        (["worker=3", "cache=9"], "cache=9: at most 8"),
    ],
)
def test_what_cannot_be_carried_out_is_refused_in_words(words: list[str], why: str) -> None:
    with pytest.raises(BadScale) as caught:
        parse(words)
    assert why in str(caught.value)


def test_growing_takes_the_lowest_free_numbers_and_shrinking_ends_the_highest_first() -> None:
    present = {"worker": {0, 2, 5}, "scheduler": {0, 1, 2}, "gateway": {0}}
    wanted = {"worker": 5, "scheduler": 1, "gateway": 1, "cache": 2}
    assert changes(present, wanted) == [
        Change("worker", added=(1, 3)),
        Change("scheduler", removed=(2, 1)),
        Change("cache", added=(0, 1)),
    ]


counts = st.fixed_dictionaries({role: st.integers(FEWEST[role], MOST[role]) for role in MOST})
present = st.fixed_dictionaries({role: st.sets(st.integers(0, 80), max_size=12) for role in MOST})


@given(present, counts)
def test_every_role_has_what_was_asked_for_afterwards(before: dict[str, set[int]], wanted: dict[str, int]) -> None:
    after = {role: set(indices) for role, indices in before.items()}
    found = changes(before, wanted)
    for change in found:
        assert after[change.role].isdisjoint(change.added)
        assert after[change.role].issuperset(change.removed)
        after[change.role] |= set(change.added)
        after[change.role] -= set(change.removed)
    assert {role: len(indices) for role, indices in after.items()} == wanted
    assert [change.role for change in found] == sorted((c.role for c in found), key=STOP_ORDER.index)
