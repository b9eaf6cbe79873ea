"""How long a step may take: a long prompt enters in pieces that are cut by time, not by a fixed count.

What a prompt token costs grows with the context before it and with whatever else wants the machine, so a fixed piece is
sometimes too short and sometimes stops everybody for seconds, which others would rightly take for a hung worker. The
piece follows the last step: proportionally down at once, at most doubling up.
"""

# Even a piece far over its time advances by one block's worth.
LEAST_TOKENS = 16
FIRST_TOKENS = 64


class Pace:
    """`budget` is how many prompt tokens the next step may compute, so that it takes some `step_s`."""

    def __init__(self, most_tokens: int, step_s: float) -> None:
        self.most_tokens = most_tokens
        self._least = min(LEAST_TOKENS, most_tokens)
        self._step_s = step_s
        self.budget = min(FIRST_TOKENS, most_tokens)

    def record(self, duration_s: float, prefill_tokens: int) -> None:
        """A step that computed `prefill_tokens` of prompts took so long."""
        if not prefill_tokens:
            return
        fitting = prefill_tokens * self._step_s / max(duration_s, 1e-9)
        if fitting < self.budget or prefill_tokens >= self.budget:  # a short piece says little of how far to go up
            self.budget = round(min(max(fitting, self._least), 2 * self.budget, self.most_tokens))
