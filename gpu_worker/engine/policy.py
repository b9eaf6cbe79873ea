"""What the engine asks of whoever decides which sequences a step computes: schedule.py, or static_policy.py."""

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Protocol

from gpu_worker.engine.holdings import Holdings
from gpu_worker.engine.kv import BlockPool
from gpu_worker.engine.sequence import Piece, Sequence


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounded the last step: choices that may run, and what it could spend on prompts."""

    sequences: int
    prompt_tokens: int = 0
    prompt_ms: float = 0.0


class Policy(Protocol):
    """Owns the order of things, and who holds which block. Synchronous; never raises for want of room."""

    pool: BlockPool
    holdings: Holdings
    waiting: list[Sequence]  # in order of arrival
    running: list[Sequence]  # likewise; those that hold blocks and have not ended
    limits: Limits
    full_step_tokens: int  # most prompt tokens of a step

    @property
    def preemptions(self) -> int:
        """How often some sequence gave way to others."""

    def add(self, sequence: Sequence) -> None:
        """A sequence begins to wait."""

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is: it has ended."""

    def plan_step(self) -> tuple[list[Piece], list[int]]:
        """This step's work, blocks included, and the blocks among them that are new and need clearing."""

    def note(self, pieces: Many[Piece], duration_s: float, now_s: float) -> None:
        """The step that computed these took so long."""
