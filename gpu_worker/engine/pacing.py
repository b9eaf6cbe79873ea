"""How much of prompts a step may compute: a long prompt enters in pieces that are cut by time, not by a fixed count.

    nobody decodes     as much as `step_s` holds: steps must not look hung, and there is no stream to hold up
    somebody decodes   the step, decodes included, may take `itl_target_s`; without such a setting `stretch` times what
                       a step took before the prompts came, reckoned for all that are here: when many start together,
                       those ahead leave the others the time, and while a long prompt enters the streams' own growth is
                       not added to their gaps. Where more prompts wait than streams run, prompts get so many times the
                       share, up to `longest_s`: each millisecond is then waited for by more of those

and never more than `most_tokens`, nor more than twice the most that was tried. Two floors keep a target that is too
tight from starving prompts in pieces that are mostly a step's fixed cost: LEAST_TOKENS, and LEAST_SHARE of the time
that the step takes without them. So a gap is at most the larger of the target and (1 + LEAST_SHARE) times the
undisturbed one, as far as steps take what they are expected to (costs.py).
"""

from dataclasses import dataclass

from gpu_worker.engine.costs import Shape, StepCosts
from mesh.blocks import BLOCK_TOKENS

LEAST_TOKENS = 16
LEAST_SHARE = 0.5
FIRST_TOKENS = 64
GROWTH = 2
# What each step with prompts replaces of the context that streams had before prompts came: a load that never pauses is
# paced by its streams as they are.
FORGETTING = 1 / 1000
# A piece that does not end a prompt ends with a block, if that leaves out no more of it than this.
BLOCK_LOSS = 1 / 8


@dataclass(frozen=True, slots=True)
class Goals:
    """What steps may take, in seconds and prompt tokens. `itl_target_s` 0 = `stretch` and `longest_s` decide."""

    most_tokens: int
    step_s: float
    stretch: float
    itl_target_s: float = 0.0
    longest_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Streams:
    """Choices that decode: how many, and the tokens of context that they read together."""

    rows: int
    context: int


@dataclass(slots=True)
class Budget:
    """What a step may still spend on prompts. Of `least` tokens it is sure, whatever they take."""

    costs: StepCosts
    tokens: int
    seconds: float
    least: int

    def fitting(self, start: int, most: int) -> int:
        """How many of a prompt's next `most` tokens, from `start` on, the budget holds."""
        by_time = self.costs.fitting(start, self.seconds)
        count = int(min(most, self.tokens, max(by_time, self.least, 0)))
        whole = (start + count) // BLOCK_TOKENS * BLOCK_TOKENS - start
        return whole if count < most and whole >= (1 - BLOCK_LOSS) * count else count

    def spend(self, start: int, count: int) -> None:
        """`count` tokens from `start` on are in the step. A negative count takes them out again."""
        seconds = self.costs.prompt_s(start, abs(count))
        self.seconds -= seconds if count > 0 else -seconds
        self.tokens -= count
        self.least -= count

    def share(self, of: int) -> "Budget":
        """Another budget, as large as one of so many shares, rounded up."""
        return Budget(self.costs, -(-self.tokens // of), self.seconds / of, -(-self.least // of))


class Pace:
    """Gives each step its budget, and learns from what steps took."""

    def __init__(self, goals: Goals) -> None:
        self.goals = goals
        self.costs = StepCosts()
        self._tried = 0  # the most prompt tokens that one step computed
        self._context: float | None = None  # tokens a stream, as prompts began to come; None = nobody decoded

    def budget(self, decoding: Streams, soon_rows: int) -> Budget:
        """For a step in which `decoding` get a token, of the `soon_rows` that are here."""
        most = max(FIRST_TOKENS, GROWTH * self._tried) if self.costs.knows_prompts else FIRST_TOKENS
        tokens = min(self.goals.most_tokens, most)
        decode_s = self.costs.decode_s(decoding.rows, decoding.context)
        step_s = self._step_s(decoding, soon_rows) if decoding.rows else self.goals.step_s
        return Budget(self.costs, tokens, max(step_s - decode_s, LEAST_SHARE * decode_s), min(LEAST_TOKENS, tokens))

    def calm_s(self, decoding: Streams, rows: int) -> float:
        """A step without prompts in which `rows` choices decode, with contexts like those of `decoding`."""
        return self.costs.decode_s(rows, decoding.context * rows // max(1, decoding.rows))

    def _step_s(self, decoding: Streams, soon_rows: int) -> float:
        """What the step may take in all, while somebody decodes."""
        return min(self.goals.itl_target_s or self._stretched_s(decoding, soon_rows), self.goals.step_s)

    def _stretched_s(self, decoding: Streams, soon_rows: int) -> float:
        context = decoding.context
        if self._context is not None:
            context = min(context, round(self._context * decoding.rows))
        calm_s = self.calm_s(Streams(decoding.rows, context), soon_rows)
        waiting = max(1.0, (soon_rows - decoding.rows) / decoding.rows)  # prompts for each stream
        shared_s = calm_s * (1 + (self.goals.stretch - 1) * waiting)
        return max(self.goals.stretch * calm_s, min(shared_s, self.goals.longest_s))

    def record(self, shape: Shape, duration_s: float) -> None:
        """A step took so long."""
        self._remember(shape)
        self._tried = max(self._tried, shape.tokens)
        self.costs.record(shape, duration_s)

    def _remember(self, shape: Shape) -> None:
        """How long the streams' contexts are, until prompts come."""
        if not shape.rows:
            self._context = None
            return
        context = shape.row_context / shape.rows
        if self._context is None or not shape.tokens:
            self._context = context
        self._context += FORGETTING * (context - self._context)
