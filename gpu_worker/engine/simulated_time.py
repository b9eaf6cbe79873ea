"""How long a step of a simulated engine takes. Pure.

    seconds = step + prefill tokens / rate + decoding rows x row + context tokens read x context token

The first term is what a step costs whatever is in it (reading the weights, launching kernels), so a batch is cheap;
the third is what it costs more with each choice, the last what attention reads of the KV before the tokens computed.
With the defaults one choice decodes at 165 tokens/s and 64 choices of 1,000 tokens' context at 5,200 together.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpu_worker.engine.api import Parts
from gpu_worker.engine.sequence import Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingModel:
    """The four numbers, in seconds and tokens per second."""

    step_s: float
    prefill_tokens_per_s: float
    row_s: float
    context_token_s: float

    def seconds(self, pieces: Iterable[Piece]) -> float:
        """Of a step that computes these pieces; one token is a decode, more are a prefill."""
        rows = prefill = context = 0
        for piece in pieces:
            context += piece.start
            if piece.count == 1:
                rows += 1
            else:
                prefill += piece.count
        return (
            self.step_s
            + prefill / self.prefill_tokens_per_s
            + rows * self.row_s
            + context * self.context_token_s
        )  # fmt: skip

    def parts(self, pieces: Sequence[Piece], sampling_s: float) -> Parts:
        """The same by part: attention is what reading the context takes, the matmuls of all parts are told as one."""
        attention_s = sum(piece.start for piece in pieces) * self.context_token_s
        matmuls_s = max(0.0, self.seconds(pieces) - attention_s - sampling_s)
        return Parts(attention_s=attention_s, feed_forward_s=matmuls_s, sampling_s=sampling_s, other_s=0.0)
