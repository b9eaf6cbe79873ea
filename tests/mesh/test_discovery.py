"""Replicas behind a name or in a file, and which of them owns a key."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.discovery import TargetFile, Targets, addresses, at_each, owner, resolve
from mesh.settings import split_targets

Eventually = Callable[..., Awaitable[object]]
replicas = st.sets(st.integers(1, 250).map(lambda n: f"10.0.0.{n}:50061"), min_size=2, max_size=8)
FIRST, SECOND = ("127.0.0.1", 1), ("127.0.0.1", 2)


async def test_names_and_addresses_resolve_to_addresses() -> None:
    found = await resolve(split_targets("localhost:50061, 127.0.0.1:50062"))
    assert found == {"127.0.0.1:50061", "127.0.0.1:50062"}


async def test_a_name_that_does_not_resolve_adds_nothing() -> None:
    assert await resolve(split_targets("nowhere.invalid:1,127.0.0.1:2")) == {"127.0.0.1:2"}


@pytest.mark.parametrize("bad", ["host", "host:", "host:port", ":1", "host:99999", "file://here/targets", "file://"])
def test_a_target_that_is_not_host_and_port_is_named(bad: str) -> None:
    with pytest.raises(ValueError, match="host:port") as caught:
        split_targets(f"fine:1,{bad}")
    assert repr(bad) in str(caught.value)


def test_a_target_may_be_a_file_of_targets_beside_others(tmp_path: Path) -> None:
    path = tmp_path / "with, a comma"
    path.write_text("# who is there\n127.0.0.1:2, localhost:3\n\nhost:4  # the last\n")
    targets = Targets(f"127.0.0.1:1, {path.as_uri()}")
    assert targets.pairs() == [FIRST, SECOND, ("localhost", 3), ("host", 4)]


@pytest.mark.parametrize("broken", [None, "", "127.0.0.1:1\n127.0.0", "127.0.0.1:1,file:///other", "\n \n"])
def test_a_file_that_cannot_be_understood_keeps_its_last_list_and_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, broken: str | None
) -> None:
    path = tmp_path / "targets"
    path.write_text("127.0.0.1:1")
    file = TargetFile(path)
    assert file.read() == [FIRST]
    path.unlink()
    if broken is not None:
        path.write_text(broken)
    assert file.changed()
    assert (file.read(), file.read()) == ([FIRST], [FIRST])
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert str(path) in caplog.text
    path.write_text("127.0.0.1:2")
    assert file.read() == [SECOND]
    path.unlink()
    assert file.read() == [SECOND]
    assert len(caplog.records) == 2, "it is told again after it was well"


async def test_addresses_follow_a_file_as_it_comes_changes_and_says_that_nobody_is_there(
    tmp_path: Path, eventually: Eventually
) -> None:
    path = tmp_path / "targets"
    heard: list[frozenset[str]] = []

    async def listen() -> None:
        async for found in addresses(path.as_uri()):
            heard.append(found)

    async with asyncio.TaskGroup() as group:
        listening = group.create_task(listen())
        await eventually(lambda: heard == [frozenset()])
        for text in ("127.0.0.1:1", "127.0.0.1:1\n127.0.0.1:2", "# nobody", "127.0.0.1:1"):
            before = len(heard)
            path.write_text(text)
            await eventually(lambda before=before: len(heard) > before, timeout_s=1.5)
        listening.cancel()
    one, two = frozenset({"127.0.0.1:1"}), frozenset({"127.0.0.1:1", "127.0.0.1:2"})
    assert heard[1:] == [one, two, frozenset(), one]


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


async def test_work_runs_at_each_address_and_ends_when_that_is_gone(tmp_path: Path, eventually: Eventually) -> None:
    targets, at_work = tmp_path / "targets", set()

    async def work(address: str) -> None:
        at_work.add(address)
        try:
            await asyncio.Event().wait()
        finally:
            at_work.discard(address)

    def say(*lines: str) -> None:
        part = tmp_path / "part"
        part.write_text("\n".join(("# replicas", *lines)))
        part.replace(targets)

    say("127.0.0.1:1", "127.0.0.1:2")
    async with asyncio.TaskGroup() as group:
        following = group.create_task(at_each(f"file://{targets}", work, "test"))
        await eventually(lambda: at_work == {"127.0.0.1:1", "127.0.0.1:2"})
        say("127.0.0.1:2", "127.0.0.1:3")
        await eventually(lambda: at_work == {"127.0.0.1:2", "127.0.0.1:3"})
        following.cancel()
    assert at_work == set()
