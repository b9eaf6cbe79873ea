"""What an engine asks of whatever computes its steps, and what it gets back. Nothing here knows torch.

Schedule, pool, prefix cache, preemption and events are the engine's own and the same for every runner.
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Protocol

from gpu_worker.engine.api import Logprob, Parts
from gpu_worker.engine.sequence import Piece
from mesh.sampling import Sampling

# Of so many runs one is timed by part. A prime: no rhythm of prompts and answers falls in step with it.
TIMED_EVERY = 61
# The error of a sequence whose logits are not numbers.
NO_NUMBERS = "the model gave no usable numbers for this request"


@dataclass(frozen=True, slots=True)
class Sampled:
    """A chosen token, with its log-probability if asked for."""

    token: int
    logprob: Logprob | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a piece: a token if it reached the end of what is known, or an error for its sequence alone."""

    piece: Piece
    sampled: Sampled | None = None
    error: str = ""

    @classmethod
    def of(cls, piece: Piece, sampled: Sampled | None) -> "Outcome":
        """Of a piece that samples; None = its logits gave no token."""
        if sampled is None:
            return cls(piece, error=NO_NUMBERS)
        return cls(piece, sampled)


class Runner(Protocol):
    """Computes steps over the pool's blocks, whose content it owns. One thread."""

    def check(self, sampling: Sampling) -> None:
        """Raise InvalidRequest, naming the field, for what no step of this runner could honour."""

    def clear(self, blocks: list[int]) -> None:
        """Blocks that sequences got for this step: whatever they held is void."""

    def run(self, pieces: Many[Piece], ending_ids: Many[int]) -> list[Outcome]:
        """Compute the pieces together; one outcome each, in their order. `ending_ids` end an answer by themselves.

        A token depends on its own sequence only. Whatever is raised has changed nothing but the pieces' own blocks.
        """

    def parts(self) -> Parts | None:
        """Where the time of the last `run` went, if that was one of those that are timed (one in TIMED_EVERY)."""
