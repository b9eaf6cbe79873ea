"""One running choice and the request it belongs to: everything that survives losing its KV.

A sequence is "known up to" len(ids) (prompt, then output) and "computed up to" `computed` (tokens whose KV is in
`blocks`). Whoever computes it does not ask which tokens are prompt: a new prompt, one resumed from another worker and
one preempted here are the same case, known ids without KV. Where known - computed = 1 the step is a decode.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpu_worker.engine.api import Plan, Reason
from mesh.blocks import BLOCK_TOKENS, chain_key
from mesh.sampling import Sampling

if TYPE_CHECKING:
    from gpu_worker.engine.grammar import Grammar
    from gpu_worker.engine.rows import Row


def blocks_for(tokens: int) -> int:
    """Blocks that `tokens` tokens fill, the last one perhaps partly."""
    return -(-tokens // BLOCK_TOKENS)


@dataclass(frozen=True, slots=True)
class Swapped:
    """KV in host memory: `slots` hold blocks [first, first + len(slots)) of a sequence `computed` up to a token."""

    first: int
    slots: list[int]
    computed: int
    proven: bool


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice. `order` is its place in first-come order, for ever."""

    request: "Request"
    index: int  # which choice
    order: int
    ids: list[int]
    emitted_before: int  # output tokens the client had when this attempt began
    limit: int  # of ids: prompt + max_tokens, at most the context
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)  # chain keys of the full blocks of ids, as far as asked for
    reached: int = 0  # the furthest `computed` ever was: below it, computing is recomputing
    ended: bool = False
    row: "Row | None" = None  # what the sampler keeps of it (rows.py)
    proven: bool = False  # a token was sampled from all that was computed since it started
    described: int = 0  # whole blocks that can be found by how they begin
    swapped: Swapped | None = None  # while it waits, if its KV was not thrown away

    @property
    def sampling(self) -> Sampling:
        return self.request.plan.sampling

    @property
    def output_tokens(self) -> int:
        return len(self.ids) - len(self.request.plan.prompt_ids)

    @property
    def uncomputed(self) -> int:
        return len(self.ids) - self.computed

    def keys_up_to(self, tokens: int) -> list[bytes]:
        """Chain keys of the full blocks among the first `tokens` known ids."""
        wanted = tokens // BLOCK_TOKENS
        while len(self.keys) < wanted:
            parent = self.keys[-1] if self.keys else self.request.root
            start = len(self.keys) * BLOCK_TOKENS
            self.keys.append(chain_key(parent, self.ids[start : start + BLOCK_TOKENS]))
        return self.keys[:wanted]

    def parent_of(self, block: int) -> bytes:
        """The chain key that its block at this place follows; all ids before it are known."""
        if len(self.keys) < block:
            self.keys_up_to(block * BLOCK_TOKENS)
        return self.keys[block - 1] if block else self.request.root

    def advance(self, count: int) -> None:
        """`count` more tokens have their KV."""
        end = self.computed + count
        self.request.recomputed_tokens += max(0, min(end, self.reached) - self.computed)
        self.computed = end
        self.reached = max(self.reached, end)

    def append(self, token: int) -> None:
        self.ids.append(token)


@dataclass(slots=True, eq=False)
class Request:
    """One attempt: its choices, and what is counted once for all of them."""

    plan: Plan
    root: bytes  # namespace of its chain keys
    submitted_s: float
    sequences: list[Sequence] = field(default_factory=list)
    left: int = 0  # choices that have not ended
    grammar: "Grammar | None" = None  # what its answers must be, once it is compiled
    expected_blocks: int = 0  # what admission reckons it will come to hold
    started: bool = False  # it had a place in a step
    accepted: bool = False  # and that was said
    cached: dict[int, int] = field(default_factory=dict)
    first_step: int = 0  # number of the first step that held it (step_times.py), once accepted
    queue_ms: int = 0
    first_token_ms: int = 0
    completion_tokens: int = 0
    recomputed_tokens: int = 0

    @property
    def identity(self) -> tuple[str, int]:
        return self.plan.request_id, self.plan.attempt


@dataclass(frozen=True, slots=True)
class Ending:
    """How a sequence ends at the next step, decided outside it or before it computed anything."""

    sequence: Sequence
    reason: Reason
    completion_tokens: int
    stop_token_id: int | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step computes of one sequence: its ids [start, start + count)."""

    sequence: Sequence
    start: int
    count: int

    @property
    def samples(self) -> bool:
        """Whether the piece reaches the last known token, so that its logits choose the next one."""
        return self.start + self.count == len(self.sequence.ids)

    @property
    def only_new_output(self) -> bool:
        """Whether nothing in it is prompt or was computed before: a decode, as most pieces are."""
        sequence = self.sequence
        return self.start >= sequence.reached and self.start >= len(sequence.request.plan.prompt_ids)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens in it that this sequence computes for the first time."""
        end = min(self.start + self.count, len(self.sequence.request.plan.prompt_ids))
        return max(0, end - max(self.start, self.sequence.reached))

    @property
    def recomputed_tokens(self) -> int:
        """Tokens in it whose KV this choice had before: it was preempted, or moved here."""
        return max(0, min(self.start + self.count, self.sequence.reached) - self.start)
