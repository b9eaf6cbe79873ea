"""Replicas behind a name, and which of them owns a key."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.discovery import owner, resolve
from mesh.settings import split_targets

replicas = st.sets(st.integers(1, 250).map(lambda n: f"10.0.0.{n}:50061"), min_size=2, max_size=8)


async def test_names_and_addresses_resolve_to_addresses() -> None:
    assert await resolve("localhost:50061, 127.0.0.1:50062") == {"127.0.0.1:50061", "127.0.0.1:50062"}


async def test_a_name_that_does_not_resolve_adds_nothing() -> None:
    assert await resolve("nowhere.invalid:1,127.0.0.1:2") == {"127.0.0.1:2"}


@pytest.mark.parametrize("bad", ["host", "host:", "host:port", ":1", "host:99999"])
def test_a_target_that_is_not_host_and_port_is_named(bad: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        split_targets(f"fine:1,{bad}")


@given(replicas, st.text(max_size=20))
def test_losing_a_replica_moves_only_its_own_keys(live: set[str], key: str) -> None:
    first = owner(key, live)
    for lost in live:
        now = owner(key, live - {lost})
        assert now == first or lost == first


def test_keys_spread_over_replicas() -> None:
    live = [f"10.0.0.{n}:50061" for n in range(4)]
    owned = [owner(f"model-{n}", live) for n in range(400)]
    assert all(60 <= owned.count(replica) <= 140 for replica in live)
    assert owner("model", []) is None
