"""How many processes of each role a local mesh may have, and what a request to scale says. Pure, light to import."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

FEWEST = {"gateway": 1, "scheduler": 1, "worker": 1, "cache": 0}
MOST = {"gateway": 16, "scheduler": 8, "worker": 64, "cache": 8}
# Of a count that is typed: enough to say what is wrong with it.
MOST_DIGITS = 100
# Who loses something by going first comes later: answers stand on workers, workers on schedulers and caches.
STOP_ORDER = ("gateway", "worker", "scheduler", "cache", "valkey")


class BadScale(Exception):
    """A request to scale that cannot be carried out; nothing was done. The message says which part is wrong."""


@dataclass(frozen=True, slots=True)
class Change:
    """One role's: the indices of processes to start, lowest first, or of those to stop, highest first."""

    role: str
    added: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()


def parse(words: Sequence[str]) -> dict[str, int]:
    """`worker=3 gateway=2` as counts by role. Raises BadScale."""
    wanted: dict[str, int] = {}
    for word in words:
        role, equals, count = word.partition("=")
        if not equals:
            raise BadScale(f"{word!r} is not ROLE=COUNT")
        if role in wanted:
            raise BadScale(f"{role} is given twice")
        if not (count.isascii() and count.isdigit() and len(count) <= MOST_DIGITS):
            raise BadScale(f"{word!r}: {count!r} is not a count")
        wanted[role] = int(count)
    check(wanted)
    return wanted


def check(wanted: Mapping[str, int]) -> None:
    """Raise BadScale for a role that cannot be scaled, or not so far."""
    if not wanted:
        raise BadScale("nothing to scale is named")
    for role, count in wanted.items():
        if role not in MOST:
            raise BadScale(f"{role!r} cannot be scaled; roles are {', '.join(MOST)}")
        if count < FEWEST[role]:
            raise BadScale(f"{role}={count}: a mesh needs at least {FEWEST[role]}")
        if count > MOST[role]:
            raise BadScale(f"{role}={count}: at most {MOST[role]} on one machine")


def changes(present: Mapping[str, Set[int]], wanted: Mapping[str, int]) -> list[Change]:
    """What it takes from the `present` indices of each role to the `wanted` counts, in the order of stopping."""
    found = []
    for role in STOP_ORDER:
        if role not in wanted:
            continue
        have, count = present.get(role, frozenset()), wanted[role]
        if count > len(have):
            unused = [index for index in range(len(have) + count) if index not in have]
            found.append(Change(role, added=tuple(unused[: count - len(have)])))
        elif count < len(have):
            found.append(Change(role, removed=tuple(sorted(have, reverse=True)[: len(have) - count])))
    return found
