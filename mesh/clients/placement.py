"""A request's demand and its grants as plain values, and the events of a lease as the scheduler reads them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from mesh.clients.attempt import Meta
from mesh.clients.outcomes import FailureKind, Outcome, RefusedCause
from mesh.clients.usage import Usage, usage_to_proto
from shoal.scheduler.v1 import scheduler_pb2

LeaseEvent = scheduler_pb2.LeaseEvent


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """What placement needs to know of a request. `block_keys` are concatenated chain keys (mesh/blocks.py)."""

    meta: Meta
    prompt_tokens: int
    max_tokens: int
    expected_tokens: int
    choices: int
    block_keys: bytes
    namespace: bytes
    tokenizer_digest: bytes
    session_id: str = ""
    pool: str = ""
    model_digest: bytes = b""
    precision: str = ""
    features: Sequence[str] = ()

    def to_proto(self) -> scheduler_pb2.Demand:
        return scheduler_pb2.Demand(
            meta=self.meta.to_proto(),
            prompt_tokens=self.prompt_tokens,
            max_tokens=self.max_tokens,
            expected_tokens=self.expected_tokens,
            choices=self.choices,
            block_keys=self.block_keys,
            namespace=self.namespace,
            tokenizer_digest=self.tokenizer_digest,
            session_id=self.session_id,
            pool=self.pool,
            model_digest=self.model_digest,
            precision=self.precision,
            required_features=self.features,
        )


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """A place on a worker. `candidates` are the best three (worker id, expected ms), best first."""

    worker_id: str
    address: str
    attempt: int
    waited_ms: int
    queue_class: str
    ahead: int
    reason: str
    scheduler_id: str
    candidates: tuple[tuple[str, float], ...] = ()


@dataclass(slots=True)
class Course:
    """How far a request has come; what an Open or Adopt tells a replica that never heard of it."""

    demand: Demand
    attempt: int = 0
    emitted_tokens: int = 0
    queued_s: float = 0.0
    avoid: list[str] = field(default_factory=list)

    def open(self, waited_s: float) -> LeaseEvent:
        """Queue it, with the age that it has from this wait."""
        return LeaseEvent(
            open=scheduler_pb2.Open(
                demand=self.demand.to_proto(),
                waited_ms=int(waited_s * 1000),
                emitted_tokens=self.emitted_tokens,
                avoid=self.avoid,
                last_attempt=self.attempt,
            )
        )

    def adopt(self, grant: Grant) -> LeaseEvent:
        """It runs under `grant` of a lost replica."""
        return LeaseEvent(
            adopt=scheduler_pb2.Adopt(
                demand=self.demand.to_proto(),
                worker=scheduler_pb2.WorkerRef(worker_id=grant.worker_id, address=grant.address),
                waited_ms=int(self.queued_s * 1000),
                emitted_tokens=self.emitted_tokens,
                attempt=grant.attempt,
                avoid=self.avoid,
            )
        )

    def finished(self, outcome: Outcome, usage: Usage) -> LeaseEvent:
        return LeaseEvent(
            finished=scheduler_pb2.Finished(
                attempt=self.attempt,
                usage=usage_to_proto(usage),
                first_token_ms=usage.first_token_ms,
                outcome=scheduler_pb2.Outcome.ValueType(outcome),
            )
        )


def refused(grant: Grant, cause: RefusedCause, retry_after_s: float | None) -> LeaseEvent:
    return LeaseEvent(
        refused=scheduler_pb2.Refused(
            worker_id=grant.worker_id,
            attempt=grant.attempt,
            retry_after_ms=int((retry_after_s or 0) * 1000),
            cause=scheduler_pb2.RefusedCause.ValueType(cause),
        )
    )


def failed(grant: Grant, kind: FailureKind, reason: str, emitted_tokens: int) -> LeaseEvent:
    return LeaseEvent(
        failed=scheduler_pb2.Failed(
            worker_id=grant.worker_id,
            attempt=grant.attempt,
            emitted_tokens=emitted_tokens,
            reason=reason[:500],
            kind=scheduler_pb2.FailureKind.ValueType(kind),
        )
    )


def parked(grant: Grant, emitted_tokens: int, more_block_keys: bytes) -> LeaseEvent:
    return LeaseEvent(
        parked=scheduler_pb2.Parked(
            worker_id=grant.worker_id,
            attempt=grant.attempt,
            emitted_tokens=emitted_tokens,
            more_block_keys=more_block_keys,
        )
    )


def grant_of(message: scheduler_pb2.Grant) -> Grant:
    return Grant(
        worker_id=message.worker.worker_id,
        address=message.worker.address,
        attempt=message.attempt,
        waited_ms=message.waited_ms,
        queue_class=message.queue_class,
        ahead=message.ahead,
        reason=message.reason,
        scheduler_id=message.scheduler_id,
        candidates=tuple((c.worker_id, c.expected_ms) for c in message.candidates),
    )
