"""How long a tenant's answers tend to be: the mean that queue shares and placement reckon with (design §2)."""

# Weight of the newest answer; the memory is about its inverse in answers.
_WEIGHT = 1 / 16


class ExpectedOutput:
    """Exponential mean of output tokens per choice, by tenant."""

    def __init__(self) -> None:
        self._mean: dict[str, float] = {}

    def observe(self, tenant: str, tokens: int) -> None:
        """One choice of `tenant` ended after this many tokens."""
        mean = self._mean.get(tenant, float(tokens))
        self._mean[tenant] = mean + _WEIGHT * (tokens - mean)

    def expected(self, tenant: str, max_tokens: int) -> int:
        """Tokens one choice may be expected to take, 1 to `max_tokens`; a new tenant is expected to use them all."""
        return max(1, min(max_tokens, round(self._mean.get(tenant, max_tokens))))
