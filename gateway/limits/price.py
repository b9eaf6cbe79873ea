"""What to reserve before an answer's length is known: the source of the currency is mesh/cost.py.

A reservation assumes nothing cached and each choice as long as the tenant's answers tend to be: the 95th percentile of
the last ones, at most `max_tokens`. Reserving `max_tokens` itself would refuse tenants who ask for much and use little.
"""

from collections import deque

from mesh.cost import cost, prices_of

WINDOW = 64
# With fewer answers than this, a percentile says nothing: reserve for max_tokens.
ENOUGH = 16


def price(model: str, uncached_prompt_tokens: int, output_tokens: float) -> float:
    """Token-equivalents of a request to `model`; `output_tokens` is summed over its choices."""
    return cost(prices_of(model), uncached_prompt_tokens, output_tokens)


class OutputEstimate:
    """Each tenant's recent answers, in output tokens per choice."""

    def __init__(self) -> None:
        self._recent: dict[str, deque[int]] = {}

    def observe(self, tenant: str, output_tokens: int) -> None:
        """One choice of `tenant` ended after this many tokens."""
        self._recent.setdefault(tenant, deque(maxlen=WINDOW)).append(output_tokens)

    def expected(self, tenant: str, max_tokens: int) -> int:
        """Tokens to reserve for one choice."""
        recent = sorted(self._recent.get(tenant, ()))
        if len(recent) < ENOUGH:
            return max_tokens
        return min(max_tokens, recent[len(recent) * 95 // 100])
