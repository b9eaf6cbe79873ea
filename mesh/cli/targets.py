"""The files that tell the processes of a local mesh where their peers are (mesh/discovery.py reads them).

Gateways and workers have lists of schedulers of their own: a new one is known to workers first, so that none who asks
there finds it without workers; one that goes is unknown to gateways first.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from mesh.cli.state import run_dir

WORKER_SCHEDULERS = "schedulers-of-workers"
GATEWAY_SCHEDULERS = "schedulers-of-gateways"
WORKER_CACHES = "caches-of-workers"


def url(name: str) -> str:
    """The list as a target, for a setting."""
    return _path(name).as_uri()


def write(name: str, addresses: Iterable[str]) -> None:
    """Replace the list in one move, if it says something else now."""
    path = _path(name)
    lines = ("# Written by shoal up; who reads it follows each change.", *addresses)
    text = "".join(f"{line}\n" for line in lines)
    if path.exists() and path.read_text() == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(text)
    part.replace(path)


def _path(name: str) -> Path:
    return run_dir().absolute() / "targets" / name
