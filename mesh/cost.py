"""The one currency: what a request costs, in token-equivalents.

    cost = uncached prompt tokens x prefill price + output tokens x decode price

Prices are constants, not measurements, so that a quota means the same on every machine; whoever needs seconds divides
by a worker's measured rate. Quotas reserve at zero cache and settle with the real figures (gateway/limits); queue
shares and placement use the expected output (scheduler).
"""

from dataclasses import dataclass

PRICE_VERSION = 1


@dataclass(frozen=True, slots=True)
class Prices:
    """Token-equivalents per token. A decode token costs more: it takes a pass over the weights of its own."""

    prefill: float = 1.0
    decode: float = 4.0


# Models whose ratio differs get a row here; a change raises PRICE_VERSION.
PRICES: dict[str, Prices] = {}
DEFAULT_PRICES = Prices()


def prices_of(model: str) -> Prices:
    """The price list of a served model's name."""
    return PRICES.get(model, DEFAULT_PRICES)


def cost(prices: Prices, uncached_prompt_tokens: int, output_tokens: float) -> float:
    """Token-equivalents; the source is design §2."""
    return uncached_prompt_tokens * prices.prefill + output_tokens * prices.decode
