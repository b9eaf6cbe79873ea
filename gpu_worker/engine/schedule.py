"""Which sequences a step advances and by how much, and who gives up blocks when there are none.

    1. Every running sequence that lacks one token decodes, oldest first.
    2. What the step may spend beside them (pacing.py) goes to unfinished prefills, in pieces: half of it to the oldest,
       what is left to the shortest first. So a short prompt does not wait for a long one: behind S tokens of shorter
       ones its L are computed within 2 (S + L) / B steps of B prompt tokens. And none starves: the oldest takes at most
       twice the time that it would have alone, so behind T tokens of older ones L are done within 2 (T + L) / B steps,
       however many short ones come.
    3. Waiting sequences start, strictly in order of arrival, while a slot, budget and blocks for all their known ids
       are there. A choice waits until no sibling computes their common prompt; it then finds that in the prefix cache.

When a sequence needs a block and every one is used, some running sequence gives way and waits again (preemption.py).
The oldest is never the victim of another and any single sequence fits the pool, so the oldest always advances.
"""

from bisect import insort
from collections.abc import Sequence as Many
from operator import attrgetter

from gpu_worker.engine.adaptive import BatchLimit
from gpu_worker.engine.costs import Shape
from gpu_worker.engine.holdings import Holdings
from gpu_worker.engine.pacing import Budget, Pace, Streams
from gpu_worker.engine.policy import Limits
from gpu_worker.engine.preemption import Preemption
from gpu_worker.engine.sequence import Piece, Request, Sequence


class Schedule:
    """The waiting and the running, and the blocks they share. Implements gpu_worker.engine.policy.Policy."""

    def __init__(self, holdings: Holdings, pace: Pace, batch: BatchLimit) -> None:
        self.holdings = holdings
        self.preemption = Preemption(holdings)
        self.pool = holdings.pool
        self.full_step_tokens = pace.goals.most_tokens
        self.limits = Limits(batch.limit)
        self._pace = pace
        self._batch = batch
        self.waiting: list[Sequence] = []  # by order
        self.running: list[Sequence] = []  # by order
        self._preempted_before = 0  # as the step being planned began

    @property
    def preemptions(self) -> int:
        """How often some sequence gave way."""
        return self.preemption.recomputed + self.preemption.swapped

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_order)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and release its blocks."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self.holdings.release(sequence)

    def plan_step(self) -> tuple[list[Piece], list[int]]:
        """This step's work, blocks included, and the blocks among them that are new and need clearing."""
        self._preempted_before = self.preemptions
        pieces: list[Piece] = []
        for sequence in [one for one in self.running if one.uncomputed == 1]:
            pieces += self._piece(sequence, 1)
        pieces += self._plan_prefills(self._budget(pieces))
        if self._all_stayed():
            return pieces, self.holdings.take_fresh()
        held = set(map(id, self.running))  # growth has preempted a sequence, which may have had its piece already
        return [piece for piece in pieces if id(piece.sequence) in held], self.holdings.take_fresh()

    def note(self, pieces: Many[Piece], duration_s: float, now_s: float) -> None:
        """The step that computed these took so long."""
        shape = Shape.of(pieces)
        self._pace.record(shape, duration_s)
        decoding = Streams(shape.rows, shape.row_context)
        self._batch.record(self._pace.calm_s(decoding, shape.rows) if shape.rows else 0.0, now_s)

    def _budget(self, decodes: list[Piece]) -> Budget:
        decoding = Streams(len(decodes), sum([piece.start for piece in decodes]))
        soon = min(len(self.running) + len(self.waiting), max(len(self.running), self._batch.limit))
        budget = self._pace.budget(decoding, soon)
        self.limits = Limits(self._batch.limit, budget.tokens, budget.seconds * 1000)
        return budget

    def _plan_prefills(self, budget: Budget) -> list[Piece]:
        prefills = [one for one in self.running if one.uncomputed > 1]
        oldest, others = prefills[:1], sorted(prefills[1:], key=attrgetter("uncomputed"))
        kept = [(one.computed, budget.share(2).fitting(one.computed, one.uncomputed)) for one in oldest]
        for start, count in kept:
            budget.spend(start, count)
        pieces: list[Piece] = []
        for sequence in others:
            pieces += self._prefill(sequence, budget)
        pieces += self._start_waiting(budget)
        for start, count in kept:
            budget.spend(start, -count)
        for sequence in oldest:
            pieces += self._prefill(sequence, budget)
        return pieces

    def _prefill(self, sequence: Sequence, budget: Budget) -> list[Piece]:
        """As much of the sequence's known tokens as the budget holds."""
        pieces = self._piece(sequence, budget.fitting(sequence.computed, sequence.uncomputed))
        for piece in pieces:
            budget.spend(piece.start, piece.count)
        return pieces

    def _piece(self, sequence: Sequence, count: int) -> list[Piece]:
        """The sequence's next `count` tokens with their blocks; nothing if it had to give way."""
        if count and (self._all_stayed() or sequence in self.running) and self._grow(sequence, count):
            return [Piece(sequence, sequence.computed, count)]
        return []

    def _all_stayed(self) -> bool:
        """Whether the step being planned has preempted nobody; then nobody need be looked for among the running."""
        return self.preemptions == self._preempted_before

    def _start_waiting(self, budget: Budget) -> list[Piece]:
        pieces: list[Piece] = []
        for sequence in list(self.waiting):
            if not budget.fitting(0, 1) or len(self.running) >= self._batch.limit:
                break
            if _sibling_prefills(sequence.request):
                continue
            if not self.holdings.fits(sequence, self.running):
                break
            self._start(sequence)
            pieces += self._prefill(sequence, budget)
        return pieces

    def _start(self, sequence: Sequence) -> None:
        """Move a sequence to the running ones, with what there is of it already."""
        self.holdings.start(sequence)
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=_order)

    def _grow(self, sequence: Sequence, count: int) -> bool:
        """Blocks for `count` more tokens, taken from others if need be; False if the sequence itself gave way."""
        while not self.holdings.grow(sequence, count):
            if self._preempt() is sequence:
                return False
        return True

    def _preempt(self) -> Sequence:
        victim = self.preemption.victim(self.running)
        self.running.remove(victim)
        self.preemption.set_back(victim)
        self.add(victim)
        return victim


_order = attrgetter("order")


def _sibling_prefills(request: Request) -> bool:
    """Whether a choice of the same request computes the prompt they share right now, but for its last token."""
    prompt = len(request.plan.prompt_ids)
    return any(one.blocks and one.computed < prompt - 1 for one in request.sequences)
