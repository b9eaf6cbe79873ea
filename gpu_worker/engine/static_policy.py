"""The naive baseline, to measure the rest against: `--policy static`. Same kernels, same answers, another order.

    - Batches of 8, first come first served. The next one begins when every answer of the last has ended.
    - Prompts are padded to the longest of the batch, and padding is computed like any token. Prompts of a batch are
      computed together, by columns that a step's budget holds; then all decode, one token a step.
    - A row whose answer has ended goes on computing tokens, for nobody, until the last answer ends.
    - KV for the padded prompt and the batch's longest answer is set aside for each row as the batch begins, and in use
      until it ends. A batch that finds no room is smaller. Nothing is found again: no prefix cache.

Padding stands after the prompt, in the row's own blocks, where the answer's KV takes its place; so answers are those of
any other policy. What is kinder than it might be: the first token of a short prompt, and the end of an answer, are told
at once rather than with the whole batch.
"""

from bisect import insort
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from operator import attrgetter

from gpu_worker.engine.api import ChoicePlan, Parts, Plan
from gpu_worker.engine.costs import Shape
from gpu_worker.engine.holdings import Holdings
from gpu_worker.engine.kv import BlockPool
from gpu_worker.engine.pacing import Pace, Streams
from gpu_worker.engine.policy import Limits
from gpu_worker.engine.runner import Outcome, Runner
from gpu_worker.engine.sequence import Piece, Request, Sequence, blocks_for
from mesh.sampling import Sampling

BATCH = 8
PADDING = 0  # a token id that every vocabulary has


class UnsharedPool(BlockPool):
    """A pool in which nothing can be found."""

    def publish(self, block: int, key: bytes) -> bool:
        return False

    def describe(self, block: int, parent: bytes, ids: Many[int]) -> bool:
        return False


@dataclass(slots=True, eq=False)
class _Row:
    """One place of a batch. Its blocks stay until the batch ends; `filler` computes what nobody wants of it."""

    sequence: Sequence
    blocks: list[int]
    prompt: int  # tokens known as the batch began
    filler: Sequence = field(init=False)

    def __post_init__(self) -> None:
        sampling = Sampling(max_tokens=1, temperature=0.0, seed=0, ignore_eos=True)
        plan = Plan(request_id="", attempt=0, prompt_ids=[PADDING], choices=[ChoicePlan(0)], sampling=sampling)
        ids = list(self.sequence.ids)
        self.filler = Sequence(Request(plan, b"", 0.0), 0, self.sequence.order, ids, 0, len(ids), blocks=self.blocks)

    def column(self, start: int, count: int) -> tuple[list[Piece], list[Piece]]:
        """The prompt's and the padding's part of the columns [start, start + count)."""
        own = 0 if self.sequence.ended else max(0, min(start + count, self.prompt) - start)
        wanted = [Piece(self.sequence, start, own)] if own else []
        return wanted, self._fill(start + own, count - own, samples=False)

    def token(self, context_tokens: int) -> tuple[list[Piece], list[Piece]]:
        """The next token of the answer, or one for nobody."""
        if not self.sequence.ended:
            return [Piece(self.sequence, self.sequence.computed, 1)], []
        return [], self._fill(min(self.filler.computed, context_tokens - 1), 1, samples=True)

    def _fill(self, start: int, count: int, samples: bool) -> list[Piece]:
        """A piece that nobody wants. It chooses a token too, as a decode does, if it `samples`."""
        if not count:
            return []
        end = start + count
        self.filler.ids += [PADDING] * (end + 1 - len(self.filler.ids))
        if samples:
            del self.filler.ids[end:]
        self.filler.computed = end
        return [Piece(self.filler, start, count)]


class StaticPolicy:
    """Batches that begin and end together. Implements gpu_worker.engine.policy.Policy."""

    preemptions = 0

    def __init__(self, holdings: Holdings, pace: Pace, context_tokens: int) -> None:
        self.holdings = holdings
        self.pool = holdings.pool
        self.full_step_tokens = pace.goals.most_tokens
        self.limits = Limits(BATCH)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._pace = pace
        self._context_tokens = context_tokens
        self._rows: list[_Row] = []
        self._columns = 0  # computed of the batch's prompts
        self._fillers: list[Piece] = []
        self._shape = Shape()

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=attrgetter("order"))

    def remove(self, sequence: Sequence) -> None:
        """It has ended. Its row goes on; with the last one the batch ends."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        if sequence not in self.running:
            return
        self.running.remove(sequence)
        sequence.blocks = []
        [row] = [row for row in self._rows if row.sequence is sequence]
        row.filler.computed = sequence.computed
        if not self.running:
            self._end()

    def plan_step(self) -> tuple[list[Piece], list[int]]:
        fresh = self._begin() if not self.running else []
        prefilling = any(row.prompt > self._columns for row in self._rows if not row.sequence.ended)
        parts = self._prefill() if prefilling else [row.token(self._context_tokens) for row in self._rows]
        wanted = [piece for pieces, _ in parts for piece in pieces]
        self._fillers = [piece for _, pieces in parts for piece in pieces]
        self._shape = Shape.of([*wanted, *self._fillers])
        return wanted, fresh

    def take_fillers(self) -> list[Piece]:
        """What the step computes beside its pieces, once."""
        fillers, self._fillers = self._fillers, []
        return fillers

    def note(self, pieces: Many[Piece], duration_s: float, now_s: float) -> None:
        self._pace.record(self._shape, duration_s)

    def _begin(self) -> list[int]:
        """A batch of those that waited longest, with all the blocks that it can come to need."""
        for count in range(min(BATCH, len(self.waiting)), 0, -1):
            batch = self.waiting[:count]
            longest_answer = max(one.limit - len(one.ids) for one in batch)
            span = min(max(len(one.ids) for one in batch) + longest_answer, self._context_tokens)
            if count * blocks_for(span) <= self.pool.available:
                break
        else:
            return []
        self._columns = 0
        self.waiting, self.running = self.waiting[count:], batch
        for sequence in batch:
            blocks = [block for block in (self.pool.allocate() for _ in range(blocks_for(span))) if block is not None]
            sequence.blocks, sequence.computed = blocks, 0
            sequence.request.started = True
            self._rows.append(_Row(sequence, blocks, len(sequence.ids)))
        return [block for row in self._rows for block in row.blocks]

    def _end(self) -> None:
        for row in self._rows:
            self.pool.release(row.blocks)
        self._rows = []

    def _prefill(self) -> list[tuple[list[Piece], list[Piece]]]:
        """As many columns of the padded prompts as the budget holds."""
        budget = self._pace.budget(Streams(0, 0), len(self._rows))
        self.limits = Limits(BATCH, budget.tokens, budget.seconds * 1000)
        left = max(row.prompt for row in self._rows) - self._columns
        count = max(1, budget.share(len(self._rows)).fitting(self._columns, left))
        first, self._columns = self._columns, self._columns + count
        return [row.column(first, count) for row in self._rows]


class PaddedRunner:
    """Computes a step's fillers with its pieces, and forgets what came of them."""

    def __init__(self, runner: Runner, policy: StaticPolicy) -> None:
        self._runner = runner
        self._policy = policy
        self.check = runner.check
        self.clear = runner.clear

    def run(self, pieces: Many[Piece], ending_ids: Many[int]) -> list[Outcome]:
        """As the protocol says."""
        return self._runner.run([*pieces, *self._policy.take_fillers()], ending_ids)[: len(pieces)]

    def parts(self) -> Parts | None:
        """As the protocol says."""
        return self._runner.parts()
