"""Free loopback ports for the processes of a mesh, kept apart from those of other meshes on the machine."""

import socket
import weakref
from collections.abc import Iterable

HOST = "127.0.0.1"
# Where looking for the gateways' ports begins.
FIRST_HTTP_PORT = 8000
FIRST_GRPC_PORT = 50051


class PlanError(Exception):
    """The mesh cannot be started as asked. The message says what to change."""


class Ports:
    """Hands out free loopback ports, none twice until it is released, and none that another mesh was given.

    A process listens seconds after its port was chosen, so a free port is claimed meanwhile: by a name among the
    kernel's abstract socket names, which are as private to the machine (or container) as ports are and end with us.
    """

    def __init__(self) -> None:
        self._claims: dict[int, socket.socket] = {}
        weakref.finalize(self, _close, self._claims)

    def release(self, ports: Iterable[int]) -> None:
        """They may be handed out again."""
        for port in ports:
            self._claims.pop(port).close()

    def from_(self, first: int) -> int:
        """The first free port at or above `first`, within a hundred."""
        for port in range(first, min(first + 100, 65536)):
            if port not in self._claims and (claim := _claim(port)) is not None:
                if is_free(port):
                    self._claims[port] = claim
                    return port
                claim.close()
        raise PlanError(
            f"no free port from {first} to {min(first + 99, 65535)}: stop what listens there or name another first port"
        )


def _claim(port: int) -> socket.socket | None:
    """None if another mesh has it."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        claim.bind(f"\0shoal-port-{port}")
    except OSError:
        claim.close()
        return None
    return claim


def _close(claims: dict[int, socket.socket]) -> None:
    for claim in claims.values():
        claim.close()


def is_free(port: int) -> bool:
    """Whether a process could listen there now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True
