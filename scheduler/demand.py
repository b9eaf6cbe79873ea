"""What a request asks of the mesh, and its place among the nine classes: three priorities x three predicted sizes."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from mesh.blocks import BLOCK_TOKENS
from mesh.cost import cost, prices_of


class Priority(IntEnum):
    """How a request ranks against others; lower goes first."""

    HIGH = 0
    NORMAL = 1
    BATCH = 2


class Size(IntEnum):
    """How much a request is predicted to cost."""

    S = 0
    M = 1
    L = 2


@dataclass(frozen=True, slots=True)
class Pins:
    """What a worker must be to serve a request. An empty digest or precision means any; the rest must be equal."""

    model: str
    pool: str = "default"
    adapter: str = ""
    tokenizer_digest: bytes = b""
    model_digest: bytes = b""
    precision: str = ""
    features: frozenset[str] = frozenset()

    @property
    def line(self) -> tuple[str, str]:
        """(model, pool): requests of one line compete for the same workers."""
        return self.model, self.pool


@dataclass(frozen=True, slots=True)
class Demand:
    """One request. Tokens are counts; `expected_tokens` is the mean length of one choice, at most `max_tokens`."""

    request_id: str
    tenant: str
    pins: Pins
    prompt_tokens: int
    max_tokens: int
    expected_tokens: int
    priority: Priority = Priority.NORMAL
    choices: int = 1
    block_keys: tuple[bytes, ...] = ()
    session_id: str = ""

    def cost(self, emitted_tokens: int = 0) -> float:
        """Token-equivalents still to be spent, with nothing cached and `emitted_tokens` already with the client."""
        prices = prices_of(self.pins.model)
        return cost(prices, self.prompt_tokens + emitted_tokens, self.output_left(emitted_tokens))

    def output_left(self, emitted_tokens: int) -> int:
        """Tokens still expected over all choices: at least one each."""
        return max(self.expected_tokens * self.choices - emitted_tokens, self.choices)

    def blocks(self, emitted_tokens: int = 0) -> int:
        """KV blocks expected at the end. The prompt's blocks are shared by the choices; each adds a part block."""
        tokens = self.prompt_tokens + emitted_tokens + self.output_left(emitted_tokens)
        return -(-tokens // BLOCK_TOKENS) + self.choices - 1

    @property
    def span_tokens(self) -> int:
        """Longest that one choice may grow: what a worker's context and pool must hold."""
        return self.prompt_tokens + self.max_tokens


def size_of(cost_tokens: float, bounds: Sequence[float]) -> Size:
    """S up to bounds[0] token-equivalents, M up to bounds[1], L above."""
    return Size(sum(cost_tokens > bound for bound in bounds))


def class_name(priority: Priority, size: Size) -> str:
    """For example "normal/S"."""
    return f"{priority.name.lower()}/{size.name}"
