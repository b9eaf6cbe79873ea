"""Which replicas of a service there are, looked up again and again, and which of them owns a key.

A target is host:port. A host name with several addresses (a scaled compose or Kubernetes service) means one replica per
address, so a replica that is added or lost is noticed within LOOKUP_S.
"""

import asyncio
import hashlib
import logging
import socket
from collections.abc import AsyncIterator, Iterable

from mesh.settings import split_targets

LOOKUP_S = 2.0

log = logging.getLogger("shoal.discovery")


async def resolve(targets: str) -> frozenset[str]:
    """Every address (ip:port) behind `targets` now. A name that does not resolve adds nothing."""
    loop = asyncio.get_running_loop()
    found: set[str] = set()
    for host, port in split_targets(targets):
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
    known: frozenset[str] | None = None
    while True:
        now = await resolve(targets)
        if now != known and (now or known is None):
            known = now
            yield now
        await asyncio.sleep(LOOKUP_S)


def owner(key: str, replicas: Iterable[str]) -> str | None:
    """The replica that owns `key`: highest hash of (replica, key), so losing one moves only its own keys.

    Source: Thaler and Ravishankar, "A Name-Based Mapping Scheme for Rendezvous" (1996).
    """

    def weight(replica: str) -> bytes:
        return hashlib.blake2b(f"{len(replica)}:{replica}{key}".encode(), digest_size=16).digest()

    return max(replicas, key=weight, default=None)
