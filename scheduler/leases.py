"""One request's lease: what it is, where it stands, and which events its gateway may send now.

open ──▶ QUEUED ──grant──▶ GRANTED ──finished / the RPC ends──▶ (gone)
            ▲                 │
            └─refused, failed, parked─┘        adopt ──▶ GRANTED
"""

from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum

from mesh.errors import InvalidRequest
from scheduler.demand import Demand, Pins
from scheduler.fairness import Waiting
from scheduler.placement import Ask
from scheduler.reports import Hello


class RefusedCause(IntEnum):
    """Numbers of the contract; one that only a newer neighbour knows reads as UNSPECIFIED."""

    UNSPECIFIED = 0
    NO_ROOM = 1
    DRAINING = 2
    NOT_READY = 3
    MISMATCH = 4
    ALREADY_EXISTS = 5

    @classmethod
    def _missing_(cls, value: object) -> "RefusedCause":
        return cls.UNSPECIFIED


class FailureKind(IntEnum):
    """Numbers of the contract, unknown ones as above."""

    UNSPECIFIED = 0
    CONNECT = 1
    RESET = 2
    HUNG = 3
    STEP_ERROR = 4
    PROTOCOL = 5

    @classmethod
    def _missing_(cls, value: object) -> "FailureKind":
        return cls.UNSPECIFIED

    @property
    def of_worker(self) -> bool:
        """Whether it tells of the worker's health."""
        return self in (FailureKind.CONNECT, FailureKind.RESET, FailureKind.HUNG)


@dataclass(frozen=True, slots=True)
class Open:
    """Queue this request."""

    demand: Demand
    waited_s: float = 0.0
    emitted_tokens: int = 0
    avoid: frozenset[str] = frozenset()
    last_attempt: int = 0


@dataclass(frozen=True, slots=True)
class Adopt:
    """It runs already, placed by another replica or before a restart."""

    demand: Demand
    worker_id: str
    address: str
    attempt: int
    waited_s: float = 0.0
    emitted_tokens: int = 0
    avoid: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Refused:
    """The granted worker said no; nothing was computed."""

    worker_id: str
    attempt: int
    cause: RefusedCause = RefusedCause.NO_ROOM


@dataclass(frozen=True, slots=True)
class Failed:
    """The granted worker broke or hung, or the request raised there."""

    worker_id: str
    attempt: int
    kind: FailureKind
    emitted_tokens: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Parked:
    """The worker gave the request up in good order."""

    worker_id: str
    attempt: int
    emitted_tokens: int = 0
    more_block_keys: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The request is over. `completed` = it ran to its end, so its worker is well."""

    attempt: int
    completed: bool = True


Event = Open | Adopt | Refused | Failed | Parked | Finished


class State(Enum):
    """Where a lease stands."""

    QUEUED = "queued"
    GRANTED = "granted"


@dataclass(slots=True, eq=False)
class Lease:
    """`arrived_s` lies in the past by what was waited elsewhere; it never moves, so a requeued request keeps its age.

    `worker_id`, `domain`, `served_by` and `attempt` are of the last grant. New attempts are numbered above
    `attempt_floor` too. Workers to `avoid` cannot give the answer; those to `shun` broke under it and may
    be well again. `adrift_s` = since when an answer that a worker had is without one.
    """

    id: int
    demand: Demand
    arrived_s: float
    waited_s: float
    emitted_tokens: int = 0
    attempt: int = 0
    attempt_floor: int = 0
    state: State = State.QUEUED
    worker_id: str = ""
    domain: str = ""
    served_by: Pins | None = None
    avoid: frozenset[str] = frozenset()
    shun: frozenset[str] = frozenset()
    avoid_domains: frozenset[str] = frozenset()
    adrift_s: float | None = None
    more_keys: tuple[bytes, ...] = ()
    queued_s: float = 0.0
    ahead: int = 0
    waiting: Waiting | None = field(default=None, repr=False)
    failures: int = 0
    step_errors: int = 0

    def check(self, event: Refused | Failed | Parked) -> None:
        """Raises InvalidRequest for an event that does not follow from the last grant; names its field."""
        name = type(event).__name__.lower()
        if self.state is not State.GRANTED:
            raise InvalidRequest(f"{name}: the request is queued, no worker has it", field=name)
        if event.worker_id != self.worker_id:
            raise InvalidRequest(f"{name}: granted was worker {self.worker_id}", field=f"{name}.worker_id")
        if event.attempt != self.attempt:
            raise InvalidRequest(f"{name}: granted was attempt {self.attempt}", field=f"{name}.attempt")

    def ask(self, home: str = "") -> Ask:
        """What placement has to know."""
        return Ask(
            pins=self.demand.pins,
            prefill_tokens=self.demand.prompt_tokens + self.emitted_tokens,
            blocks=self.demand.blocks(self.emitted_tokens),
            span_tokens=self.demand.span_tokens,
            choices=self.demand.choices,
            keys=self.demand.block_keys + self.more_keys,
            avoid=self.avoid,
            shun=self.shun,
            avoid_domains=self.avoid_domains,
            home=home,
        )

    def granted(self, hello: Hello, now: float) -> None:
        """It leaves the queue for a worker, as a new attempt."""
        self.state, self.waiting = State.GRANTED, None
        self.worker_id, self.domain, self.served_by = hello.worker_id, hello.fault_domain, hello.pins
        self.waited_s += now - self.queued_s
        self.attempt = max(self.attempt, self.attempt_floor) + 1

    def emitted(self, tokens: int) -> None:
        """The client has this many tokens: from now on the answer changes neither weights nor numerics."""
        self.emitted_tokens = max(self.emitted_tokens, tokens)
        if self.emitted_tokens and self.served_by is not None:
            was = self.served_by
            pins = replace(self.demand.pins, model_digest=was.model_digest, precision=was.precision)
            self.demand = replace(self.demand, pins=pins)

    def failed(self, event: Failed, now: float) -> None:
        """Remember where not to try again."""
        self.emitted(event.emitted_tokens)
        self.adrift_s = now
        if event.kind is FailureKind.STEP_ERROR:
            self.avoid |= {event.worker_id}
        else:
            self.shun |= {event.worker_id}
        self.failures += 1
        self.step_errors += event.kind is FailureKind.STEP_ERROR
        if event.kind.of_worker and self.domain:
            self.avoid_domains |= {self.domain}
