"""Which replicas of a service there are, looked up again and again, and which of them owns a key.

A target is host:port. A host name with several addresses (a scaled compose or Kubernetes service) means one replica per
address, so a replica that is added or lost is noticed within LOOKUP_S. A target may also be a file of targets: one a
line or comma-separated, # begins a comment. Whoever changes it replaces it in one move; it is noticed in FILE_LOOK_S.
"""

import asyncio
import hashlib
import logging
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any

from mesh.settings import split_targets, target_files

LOOKUP_S = 2.0
FILE_LOOK_S = 0.2

Pair = tuple[str, int]

log = logging.getLogger("shoal.discovery")


class TargetFile:
    """A file of targets. What was last read well stands in for a file that is missing, empty or cannot be understood.

    A file of comments alone means that there is no replica; an empty one is half-written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pairs: list[Pair] = []
        self._seen: tuple[int, int, int] | None = None
        self._told = False

    def changed(self) -> bool:
        """Whether the file is another than `read` has seen."""
        return self._stamp() != self._seen

    def read(self) -> list[Pair]:
        """Its targets now, as far as can be known."""
        self._seen = self._stamp()
        try:
            self._pairs = _pairs_of(self._path.read_text())
            self._told = False
        except (OSError, ValueError) as error:
            if not self._told:
                log.warning("%s: %s; what it last said counts", self._path, error)
            self._told = True
        return self._pairs

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size


def _pairs_of(text: str) -> list[Pair]:
    if not text.strip():
        raise ValueError("it is empty")
    targets = ",".join(line.partition("#")[0] for line in text.splitlines())
    if target_files(targets):
        raise ValueError("a file of targets names no other file")
    return split_targets(targets)


class Targets:
    """What a setting of targets says: pairs of its own, and those of its files."""

    def __init__(self, targets: str) -> None:
        self._own = split_targets(targets)
        self._files = [TargetFile(path) for path in target_files(targets)]

    def pairs(self) -> list[Pair]:
        """host:port of every target now, the files read again."""
        return self._own + [pair for file in self._files for pair in file.read()]

    async def rest(self) -> None:
        """Until it is time to look again: LOOKUP_S, or less if a file changed."""
        if not self._files:
            await asyncio.sleep(LOOKUP_S)
        for _ in range(round(LOOKUP_S / FILE_LOOK_S) if self._files else 0):
            await asyncio.sleep(FILE_LOOK_S)
            if any(file.changed() for file in self._files):
                return


async def resolve(pairs: Iterable[Pair]) -> frozenset[str]:
    """Every address (ip:port) behind `pairs` now. A name that does not resolve adds nothing."""
    loop = asyncio.get_running_loop()
    found: set[str] = set()
    for host, port in pairs:
        try:
            infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError:
            log.debug("%s does not resolve", host)
            continue
        # One name may give both families of one replica; the first family found stands for it.
        family = infos[0][0]
        for info in infos:
            if info[0] is family:
                ip = info[4][0]
                found.add(f"[{ip}]:{port}" if family is socket.AF_INET6 else f"{ip}:{port}")
    return frozenset(found)


async def addresses(targets: str) -> AsyncIterator[frozenset[str]]:
    """The addresses behind `targets`: at once, then whenever they change. Never empties on a failed lookup."""
    spoken, known = Targets(targets), None
    while True:
        pairs = spoken.pairs()
        now = await resolve(pairs)
        # Nothing found behind names is a failed lookup; no names at all were written by somebody.
        if now != known and (now or not pairs or known is None):
            known = now
            yield now
        await spoken.rest()


async def at_each(targets: str, work: Callable[[str], Coroutine[Any, Any, None]], name: str) -> None:
    """Until cancelled: run `work(address)` for each address there is; a task is cancelled when its address is gone."""
    tasks: dict[str, asyncio.Task[None]] = {}
    async with asyncio.TaskGroup() as group:
        async for found in addresses(targets):
            for gone in tasks.keys() - found:
                tasks.pop(gone).cancel()
            for new in found - tasks.keys():
                tasks[new] = group.create_task(work(new), name=f"{name} {new}")


def owner(key: str, replicas: Iterable[str]) -> str | None:
    """The replica that owns `key`: highest hash of (replica, key), so losing one moves only its own keys.

    Source: Thaler and Ravishankar, "A Name-Based Mapping Scheme for Rendezvous" (1996).
    """

    def weight(replica: str) -> bytes:
        return hashlib.blake2b(f"{len(replica)}:{replica}{key}".encode(), digest_size=16).digest()

    return max(replicas, key=weight, default=None)
