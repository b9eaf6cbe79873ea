"""The scheduler's settings, and the policies made of them."""

from typing import ClassVar

from pydantic import Field

from mesh.settings import ServiceSettings
from scheduler.absence import AbsencePolicy
from scheduler.breaker import BreakerPolicy
from scheduler.dispatcher import Policies
from scheduler.placement import PlacementPolicy
from scheduler.queue import QueuePolicy


class SchedulerSettings(ServiceSettings):
    """Variables are SHOAL_SCHEDULER_<FIELD>."""

    service: ClassVar[str] = "SCHEDULER"

    port: int = Field(50061, ge=0, le=65535, description="gRPC port. 0 = any free port.")

    queue_limit: int = Field(1_000, ge=1, description="Most requests that wait for one (model, pool).")
    queue_batch_limit: int = Field(500, ge=0, description="Most batch requests among them.")
    queue_tenant_limit: int = Field(500, ge=1, description="Most requests of one tenant among them.")
    wait_target_s_s: float = Field(0.2, gt=0, description="Seconds within which a small (S) request should be granted.")
    wait_target_m_s: float = Field(0.5, gt=0, description="Seconds within which a middling (M) request should be.")
    wait_target_l_s: float = Field(3.0, gt=0, description="Seconds within which a large (L) request should be.")
    small_tokens: float = Field(2_500, gt=0, description="Costliest S request, token-equivalents.")
    middling_tokens: float = Field(20_000, gt=0, description="Costliest M request, token-equivalents.")
    patience_high_s: float = Field(5, gt=0, description="Seconds after which a waiting high request may overtake.")
    patience_normal_s: float = Field(10, gt=0, description="The same for normal priority.")
    patience_batch_s: float = Field(60, gt=0, description="The same for batch priority.")
    overtake_share: float = Field(
        0.25, gt=0, le=1, description="Share of the granted work that may go to overdue requests out of turn."
    )
    quantum_tokens: float = Field(
        2_000, gt=0, description="Token-equivalents a tenant may spend on each round of its turn."
    )

    room_prefill_ms: float = Field(
        1000, gt=0, description="A worker with this much prefill ahead of a request has no room for it."
    )
    look_ahead_sequences: int = Field(4, ge=0, description="Sequences a worker is given beyond those it can step.")
    tie_ms: float = Field(10, ge=0, description="Workers this close in expected time count as equal.")
    default_prefill_tokens_per_s: float = Field(
        1_000, gt=0, description="A worker's prefill rate until it has measured it."
    )
    stale_s: float = Field(3, gt=0, description="A worker not heard of for so long is given nothing.")

    settle_s: float = Field(3, ge=0, description="Seconds after the start in which workers may still be attaching.")
    no_worker_grace_s: float = Field(2, ge=0, description="Seconds a request waits for a worker that is not there.")
    unwell_grace_s: float = Field(15, ge=0, description="Seconds it waits while all its workers are there but unwell.")
    restart_grace_s: float = Field(
        30, ge=0, description="Seconds an answer that its worker lost waits for one, longer than a restart takes."
    )
    no_worker_retry_s: float = Field(5, ge=1, description="What a caller is told when no worker came, seconds.")

    breaker_failures: int = Field(3, ge=1, description="Failures in a row that open a worker's breaker.")
    breaker_open_s: float = Field(2, gt=0, description="Seconds it stays open at first; doubles while probes fail.")
    breaker_open_most_s: float = Field(30, gt=0, description="Longest it stays open, seconds.")
    unclaimed_after_s: float = Field(
        10, gt=0, description="Seconds after which a running attempt without lease is voted out."
    )
    most_failures: int = Field(4, ge=1, description="Workers that may fail under a request before it is given up.")
    sessions: int = Field(10_000, ge=1, description="Sessions whose last worker is remembered.")
    tick_s: float = Field(0.1, gt=0, le=1, description="Seconds between looks at what time alone changes.")

    def policies(self) -> Policies:
        """The plain dataclasses that the policies take."""
        return Policies(
            queue=QueuePolicy(
                wait_target_s=(self.wait_target_s_s, self.wait_target_m_s, self.wait_target_l_s),
                patience_s=(self.patience_high_s, self.patience_normal_s, self.patience_batch_s),
                size_bounds=(self.small_tokens, self.middling_tokens),
                overtake_share=self.overtake_share,
                quantum_tokens=self.quantum_tokens,
                limit=self.queue_limit,
                batch_limit=self.queue_batch_limit,
                tenant_limit=self.queue_tenant_limit,
            ),
            placement=PlacementPolicy(
                room_prefill_ms=self.room_prefill_ms,
                look_ahead_sequences=self.look_ahead_sequences,
                tie_ms=self.tie_ms,
                stale_s=self.stale_s,
                default_prefill_tokens_per_s=self.default_prefill_tokens_per_s,
            ),
            breaker=BreakerPolicy(self.breaker_failures, self.breaker_open_s, self.breaker_open_most_s),
            absence=AbsencePolicy(
                settle_s=self.settle_s,
                no_worker_grace_s=self.no_worker_grace_s,
                unwell_grace_s=self.unwell_grace_s,
                restart_grace_s=self.restart_grace_s,
                retry_after_s=self.no_worker_retry_s,
            ),
            unclaimed_after_s=self.unclaimed_after_s,
            most_failures=self.most_failures,
            sessions=self.sessions,
        )
