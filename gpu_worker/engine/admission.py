"""What the engine refuses, and why: requests that can never run, and requests that find no room now."""

from dataclasses import dataclass

from gpu_worker.engine.api import Plan
from gpu_worker.engine.sequence import Request, Sequence, blocks_for
from mesh.blocks import BLOCK_TOKENS
from mesh.errors import InvalidRequest, Overloaded

SHORTEST_RETRY_S, LONGEST_RETRY_S = 0.25, 30.0
UNKNOWN_RATE = 50.0  # tokens per second, until some were measured


def check(plan: Plan, vocab_size: int, context_tokens: int) -> None:
    """Raise InvalidRequest, naming the field, if the plan could never run."""
    if not plan.prompt_ids:
        raise InvalidRequest("the prompt is empty", field="prompt_ids")
    if len(plan.prompt_ids) >= context_tokens:
        message = f"the prompt has {len(plan.prompt_ids)} tokens; the context of {context_tokens} must leave one free"
        raise InvalidRequest(message, field="prompt_ids")
    _in_vocabulary(plan.prompt_ids, "prompt_ids", vocab_size)
    if plan.adapter:
        raise InvalidRequest(f"no adapter {plan.adapter!r} is loaded here", field="adapter")
    if not plan.choices or len({choice.index for choice in plan.choices}) < len(plan.choices):
        raise InvalidRequest("choices must be at least one, each index once", field="choices")
    for choice in plan.choices:
        if not 0 <= choice.index < 1 << 32:
            raise InvalidRequest(f"{choice.index} is no choice index", field="choices")
        _in_vocabulary(choice.emitted_ids, "emitted_ids", vocab_size)
    if plan.sampling.seed is None:
        raise InvalidRequest("the seed is not set", field="seed")
    plan.sampling.check(vocab_size)


def _in_vocabulary(ids: list[int], field: str, vocab_size: int) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        raise InvalidRequest(f"token id {wrong} is outside the vocabulary of {vocab_size}", field=field)


@dataclass(frozen=True, slots=True)
class Admission:
    """How much may wait, and how much of the pool may be promised. An idle engine takes whatever can run."""

    max_waiting_tokens: int
    max_waiting_sequences: int
    expected_growth: float  # share of max_tokens a choice is reckoned to use
    total_blocks: int
    max_sequences: int  # choices that run in one step
    promised: float = 1.0  # share of the pool that may be promised; what is lacking later costs preemptions

    def expected_blocks(self, request: Request) -> int:
        """What the request will come to hold: its prompt once, and each choice's output."""
        prompt = len(request.plan.prompt_ids)
        growth = sum(
            blocks_for(one.output_tokens + int(self.expected_growth * (one.limit - len(one.ids))))
            for one in request.sequences
        )
        return min(self.total_blocks, blocks_for(prompt) + growth)

    def admit(self, request: Request, present: list[Request], waiting: list[Sequence], tokens_per_s: float) -> None:
        """Raise Overloaded if the request would wait too long for its turn or its blocks.

        Raises InvalidRequest for more choices than one step runs: they would have the engine to themselves for several
        turns, and everybody else would wait behind them.
        """
        if len(request.sequences) > self.max_sequences:
            message = f"{len(request.sequences)} choices are more than the {self.max_sequences} that run at once here"
            raise InvalidRequest(message, field="choices")
        if not present:
            return
        rate = tokens_per_s or UNKNOWN_RATE
        tokens = waiting_tokens(waiting)
        if tokens and tokens + waiting_tokens(request.sequences) > self.max_waiting_tokens:
            raise _overloaded(f"{tokens} prompt tokens wait already", tokens / rate)
        if len(waiting) + len(request.sequences) > max(self.max_waiting_sequences, len(request.sequences)):
            raise _overloaded(f"{len(waiting)} sequences wait already", tokens / rate)
        promised = sum(one.expected_blocks for one in present) + request.expected_blocks
        lacking = promised - int(self.promised * self.total_blocks)
        if lacking > 0:
            raise _overloaded("the KV pool is promised to others", lacking * BLOCK_TOKENS / rate)


def waiting_tokens(waiting: list[Sequence]) -> int:
    """Tokens to compute before all have started. A prompt that choices share counts once, KV on the host not at all."""
    seen: set[int] = set()
    tokens = 0
    for one in waiting:
        if one.swapped is not None:
            tokens += len(one.ids) - one.swapped.computed
            continue
        tokens += one.output_tokens if id(one.request) in seen else len(one.ids)
        seen.add(id(one.request))
    return tokens


def _overloaded(message: str, retry_after_s: float) -> Overloaded:
    return Overloaded(message, retry_after_s=min(LONGEST_RETRY_S, max(SHORTEST_RETRY_S, retry_after_s)))
