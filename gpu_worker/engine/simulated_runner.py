"""The runner that computes nothing: it takes the time a timing model gives, and returns words."""

import time
from collections.abc import Callable
from collections.abc import Sequence as Many

from gpu_worker.engine.api import Parts
from gpu_worker.engine.runner import TIMED_EVERY, Outcome, Sampled
from gpu_worker.engine.sequence import Piece
from gpu_worker.engine.simulated_time import TimingModel
from gpu_worker.engine.simulated_words import Words
from mesh.errors import InvalidRequest
from mesh.sampling import Sampling


class SimulatedRunner:
    """Implements gpu_worker.engine.runner.Runner. Blocks have no content, so there is nothing to clear."""

    def __init__(self, timing: TimingModel, words: Words, sleep: Callable[[float], None] = time.sleep) -> None:
        self._timing = timing
        self._words = words
        self._sleep = sleep
        self._runs = 0
        self._parts: Parts | None = None

    def check(self, sampling: Sampling) -> None:
        """Refuses probabilities, for there are none. Whatever else changes them (penalties, logit_bias, temperature,
        top_p …) is accepted and changes nothing.
        """
        if sampling.top_logprobs is not None:
            raise InvalidRequest("logprobs: this worker is simulated and has no probabilities", field="logprobs")

    def clear(self, blocks: list[int]) -> None:
        """There is nothing in them."""

    def run(self, pieces: Many[Piece], ending_ids: Many[int]) -> list[Outcome]:
        """Sleeps for what the step has left after choosing its tokens."""
        began_s = time.perf_counter()
        outcomes = [Outcome(piece, self._sampled(piece, ending_ids) if piece.samples else None) for piece in pieces]
        chosen_s = time.perf_counter() - began_s
        left_s = self._timing.seconds(pieces) - chosen_s
        if left_s > 0:
            self._sleep(left_s)
        self._runs += 1
        self._parts = None if self._runs % TIMED_EVERY else self._timing.parts(pieces, chosen_s)
        return outcomes

    def parts(self) -> Parts | None:
        """What the timing model says of the last run, and the time that choosing its words took."""
        return self._parts

    def _sampled(self, piece: Piece, ending_ids: Many[int]) -> Sampled:
        sequence = piece.sequence
        return Sampled(self._words.token(sequence.sampling, sequence.index, sequence.output_tokens, ending_ids))
