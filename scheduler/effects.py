"""What the dispatcher wants done: the service turns these into messages, the simulator into events."""

from dataclasses import dataclass

from mesh.errors import ShoalError
from scheduler.placement import Candidate


@dataclass(frozen=True, slots=True)
class Granted:
    """Tell the lease its worker. `waited_s` is all it has spent in queues, elsewhere included."""

    lease_id: int
    worker_id: str
    address: str
    attempt: int
    reason: str
    queue_class: str
    waited_s: float = 0.0
    ahead: int = 0
    candidates: tuple[Candidate, ...] = ()
    adopted: bool = False


@dataclass(frozen=True, slots=True)
class Requeued:
    """The request waits again; nothing is said to its gateway, which caused it."""

    lease_id: int
    cause: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The lease is over: well if `error` is None."""

    lease_id: int
    error: ShoalError | None


@dataclass(frozen=True, slots=True)
class SnapshotOrdered:
    """Tell the worker to send all its block keys: some events were lost."""

    connection: int


@dataclass(frozen=True, slots=True)
class Voted:
    """Tell the worker this replica's whole set of unclaimed attempts."""

    connection: int
    attach_epoch: int
    attempts: frozenset[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Disconnected:
    """End the worker's stream."""

    connection: int
    error: ShoalError


Effect = Granted | Requeued | Ended | SnapshotOrdered | Voted | Disconnected
