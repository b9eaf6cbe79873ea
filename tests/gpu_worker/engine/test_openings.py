"""Beginnings of blocks: what is found, what stays in bounds, and who may write where."""

from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.engine.kv import BlockPool
from gpu_worker.engine.openings import NEWEST, Opening, Openings

IDS = st.lists(st.integers(0, 2), min_size=1, max_size=6)
PARENTS = st.sampled_from([b"one", b"two"])


def common(one, other) -> int:
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count


@given(
    changes=st.lists(st.tuples(st.integers(0, 9), PARENTS, IDS, st.booleans()), max_size=14), parent=PARENTS, ids=IDS
)
@settings(deadline=None)
def test_the_block_that_shares_most_is_found_whatever_came_and_went(changes, parent, ids):
    openings, model = Openings(), {}
    for block, of, tokens, stays in changes:
        covered = any(p == of and common(t, tokens) == len(tokens) for other, (p, t) in model.items() if other != block)
        if openings.add(block, Opening(of, tuple(tokens))):
            model[block] = (of, tokens)
        else:
            assert covered
        if not stays:
            openings.remove(block)
            model.pop(block, None)
    block, shared = openings.find(parent, ids)
    assert shared == max([common(t, ids) for p, t in model.values() if p == parent], default=0)
    assert block == -1 if not shared else common(model[block][1], ids) == shared
    assert set(openings.blocks()) == set(model)
    assert {block: openings.length(block) for block in range(10)} == {
        b: len(model.get(b, ((), ()))[1]) for b in range(10)
    }


def test_a_look_up_reads_only_the_newest_of_those_that_begin_alike():
    openings = Openings()
    openings.add(0, Opening(b"p", (1, 2, 3)))
    for block in range(1, NEWEST + 1):
        openings.add(block, Opening(b"p", (1, 9, block)))
    assert openings.find(b"p", (1, 2, 3))[1] == 1
    openings.remove(NEWEST)
    assert openings.find(b"p", (1, 2, 3)) == (0, 3)


def test_nothing_is_kept_of_blocks_that_were_forgotten():
    openings = Openings()
    for block in range(100):
        openings.add(block, Opening(b"p", (block,)))
    for block in range(100):
        openings.remove(block)
    assert not openings._of
    assert not openings._groups


def test_a_block_that_begins_like_a_prompt_is_cached_and_evicted_like_any_other():
    pool = BlockPool(2)
    block = pool.allocate()
    assert pool.describe(block, b"root", [1, 2, 3])
    pool.release([block])
    assert (pool.free, pool.cached, pool.used) == (1, 1, 0)
    assert pool.nearest(b"root", [1, 2, 9]) == (block, 2)
    assert pool.keys() == [], "what has no chain key is nothing to report"
    assert {pool.allocate(), pool.allocate()} == {0, 1}
    assert pool.nearest(b"root", [1, 2, 9]) == (-1, 0)
    assert pool.take_changes() == ([], [])
    pool.check()


def test_a_holder_writes_only_where_nobody_else_reads():
    pool = BlockPool(3)
    block = pool.allocate()
    assert pool.writable(block, 0)
    pool.describe(block, b"root", [1, 2, 3])
    assert not pool.writable(block, 2), "others may find three tokens in it"
    assert pool.writable(block, 3)
    pool.take(block)
    assert not pool.writable(block, 3), "somebody else holds it"
    pool.release([block])
    pool.publish(block, b"k" * 16)
    assert not pool.writable(block, 15), "it can be found whole"


def test_what_was_disowned_is_found_in_no_way():
    pool = BlockPool(2)
    block = pool.allocate()
    pool.publish(block, b"k" * 16)
    pool.describe(block, b"root", list(range(16)))
    pool.disown([block])
    assert pool.nearest(b"root", [0, 1]) == (-1, 0)
    assert b"k" * 16 not in pool
    pool.release([block])
    assert pool.free == 2
