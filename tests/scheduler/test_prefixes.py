"""The index of prompt blocks against the plainest way of counting."""

from hypothesis import given
from hypothesis import strategies as st

from scheduler.prefixes import PrefixIndex, Tier

KEYS = [bytes([i]) * 16 for i in range(6)]
operations = st.lists(
    st.tuples(
        st.sampled_from(["store", "evict", "clear"]),
        st.integers(0, 11),
        st.sampled_from(Tier),
        st.lists(st.sampled_from(KEYS), max_size=6),
    ),
    max_size=40,
)


def leading(held: dict[Tier, set[bytes]], chain: list[bytes]) -> list[int]:
    counts = [0] * len(Tier)
    for key in chain:
        tier = next((tier for tier in Tier if key in held[tier]), None)
        if tier is None:
            break
        counts[tier] += 1
    return counts


@given(operations, st.lists(st.sampled_from(KEYS), max_size=6, unique=True))
def test_leading_blocks_are_counted_at_their_nearest_tier_until_the_first_gap(steps, chain) -> None:
    index = PrefixIndex()
    held = {slot: {tier: set() for tier in Tier} for slot in range(12)}
    for name, slot, tier, keys in steps:
        if name == "store":
            index.store(slot, tier, keys)
            held[slot][tier].update(keys)
        elif name == "evict":
            index.evict(slot, tier, keys)
            held[slot][tier].difference_update(keys)
        else:
            index.clear(slot)
            held[slot] = {tier: set() for tier in Tier}
    counts = index.leading(chain, slots=12)
    assert [list(counts[:, slot]) for slot in range(12)] == [leading(held[slot], chain) for slot in range(12)]


def test_a_key_that_nobody_holds_takes_no_room() -> None:
    index = PrefixIndex()
    index.store(0, Tier.DEVICE, KEYS)
    index.store(1, Tier.DEVICE, KEYS)
    index.evict(0, Tier.DEVICE, KEYS)
    assert len(index) == len(KEYS)
    index.clear(1)
    assert len(index) == 0
