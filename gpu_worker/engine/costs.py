"""What a step costs on this machine, fitted from the steps themselves. Pure; no clock.

    seconds = fixed + rows x row + context before all x read + tokens x token + tokens' context x attend

Rows decode: each costs its share of the matmuls and reads the KV before it. So does a piece of a prompt, once for all
its tokens, which makes small pieces far into a prompt dear. Prompt tokens cost more each, and each attends to all
before it, so a long prompt gets dearer as it goes on.

The fit is a weighted least squares with no coefficient below zero. Errors count relative to the step's length, so that
short steps are not drowned by long ones. Steps that only decode and steps with prompts are remembered apart, each kind
fading with steps of its own: hours of decoding do not wear away what a prompt token costs. Two guards against a
machine that others use, too: a step counts as at most twice (at least half) of what was expected, so that a stray one
moves little; and the prediction is multiplied by the median of what the last five steps took over what was expected,
so that a lasting change is followed from the third step on. Until that median can tell one from the other a step is
not reckoned with at all.
"""

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, sqrt

from gpu_worker.engine.sequence import Piece

FADING = 0.97  # what a step still weighs after another one of its kind
STRAY = 2.0  # a step counts as at most so many times what was expected
KNOWN_STEPS = 4  # of a kind, until one can be called a stray
RECENT_STEPS, DOUBTFUL_STEPS = 5, 2
LASTING = 1.5  # a median so far off is no noise: everything known is scaled by it
SWEEPS, FIRST_SWEEPS = 8, 60
YOUNG_STEPS, FIT_EVERY = 20, 4  # of a kind: until then each step is fitted at once, later one in so many
SIZE = 5  # coefficients
# Who explains a step while there are too few to tell: prompts their tokens, decodes the fixed time.
ORDER = (3, 0, 1, 4, 2)


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a step its time depends on.

    `row_context` and `piece_context` sum the tokens before each row and each piece of a prompt, `token_context` the
    positions of all prompt tokens.
    """

    rows: int = 0
    row_context: int = 0
    tokens: int = 0
    token_context: float = 0.0
    piece_context: int = 0

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> "Shape":
        """One token is a row, more are a piece of a prompt."""
        rows = row_context = tokens = piece_context = 0
        token_context = 0.0
        for piece in pieces:
            if piece.count == 1:
                rows += 1
                row_context += piece.start
            else:
                tokens += piece.count
                token_context += context_of(piece.start, piece.count)
                piece_context += piece.start
        return cls(rows, row_context, tokens, token_context, piece_context)

    @property
    def features(self) -> tuple[float, float, float, float, float]:
        return 1.0, self.rows, self.row_context + self.piece_context, self.tokens, self.token_context


def context_of(start: int, count: int) -> float:
    """Sum of the positions of `count` tokens from `start` on."""
    return count * (start + count / 2)


class _Sums:
    """The normal equations of one kind of step, fading."""

    def __init__(self) -> None:
        self.steps = 0
        self.squares = [[0.0] * SIZE for _ in range(SIZE)]
        self.products = [0.0] * SIZE

    def add(self, features: tuple[float, ...], seconds: float) -> None:
        self.steps += 1
        relative = [one / seconds for one in features]
        for row, (square, one) in enumerate(zip(self.squares, relative, strict=True)):
            self.squares[row] = [FADING * old + one * other for old, other in zip(square, relative, strict=True)]
        self.products = [FADING * old + one for old, one in zip(self.products, relative, strict=True)]

    def scale(self, factor: float) -> None:
        """As if every step had taken `factor` times as long."""
        self.squares = [[one / factor**2 for one in row] for row in self.squares]
        self.products = [one / factor for one in self.products]


class StepCosts:
    """Predicts steps, and prompts' share of them, in seconds."""

    def __init__(self) -> None:
        self._kinds = _Sums(), _Sums()  # steps that only decode, steps with prompts
        self._costs = [0.0] * SIZE
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)  # seconds over what was expected
        self._pace = 1.0  # their median
        self._doubtful: deque[tuple[Shape, float]] = deque()

    @property
    def knows_prompts(self) -> bool:
        """Whether any prompt was seen."""
        return self._kinds[1].steps > 0

    def record(self, shape: Shape, duration_s: float) -> None:
        """One step took so long."""
        seconds, expected_s = max(duration_s, 1e-6), self._fitted(shape)
        if self._kind(shape).steps < KNOWN_STEPS or not expected_s:
            self._learn(shape, seconds)
            return
        self._recent.append(seconds / expected_s)
        self._follow()
        self._doubtful.append((shape, seconds))
        if len(self._doubtful) > DOUBTFUL_STEPS:
            shape, seconds = self._doubtful.popleft()
            expected_s = self._fitted(shape)
            self._learn(shape, min(max(seconds, expected_s / STRAY), expected_s * STRAY))

    def decode_s(self, rows: int, context: int) -> float:
        """A step of so many rows that reads so many tokens' KV, and computes no prompt."""
        return self._pace * self._fitted(Shape(rows, context))

    def prompt_s(self, start: int, count: int) -> float:
        """What `count` tokens from `start` on add to a step."""
        if not count:
            return 0.0
        _, _, read, token, attend = self._costs
        return self._pace * (read * start + token * count + attend * context_of(start, count))

    def fitting(self, start: int, seconds: float) -> float:
        """How many tokens from `start` on take `seconds`; infinity where they cost nothing."""
        _, _, read, token, attend = self._costs
        left_s = max(0.0, seconds / self._pace - read * start)
        linear, square = token + attend * start, attend / 2
        divisor = linear + sqrt(linear**2 + 4 * square * left_s)
        return 2 * left_s / divisor if divisor else inf

    def _kind(self, shape: Shape) -> _Sums:
        return self._kinds[shape.tokens > 0]

    def _learn(self, shape: Shape, seconds: float) -> None:
        kind = self._kind(shape)
        kind.add(shape.features, seconds)
        if kind.steps < YOUNG_STEPS:
            self._fit(FIRST_SWEEPS)
        elif kind.steps % FIT_EVERY == 0:
            self._fit(SWEEPS)

    def _fitted(self, shape: Shape) -> float:
        return sum(cost * feature for cost, feature in zip(self._costs, shape.features, strict=True))

    def _follow(self) -> None:
        self._pace = statistics.median(self._recent) if len(self._recent) == RECENT_STEPS else 1.0
        if not 1 / LASTING < self._pace < LASTING:
            for kind in self._kinds:
                kind.scale(self._pace)
            self._costs = [cost * self._pace for cost in self._costs]
            self._recent.clear()
            self._pace = 1.0

    def _fit(self, sweeps: int) -> None:
        """Coordinate descent from where the last fit ended: what no step has told anew stays as it was."""
        plain, mixed = self._kinds
        squares = [
            [a + b for a, b in zip(*rows, strict=True)] for rows in zip(plain.squares, mixed.squares, strict=True)
        ]
        products = [a + b for a, b in zip(plain.products, mixed.products, strict=True)]
        costs = self._costs
        for _ in range(sweeps):
            for at in ORDER:
                row = squares[at]
                if row[at]:
                    rest = products[at] - sum(one * cost for one, cost in zip(row, costs, strict=True))
                    costs[at] = max(0.0, costs[at] + rest / row[at])
