"""One choice as the sampler sees it: what its next token depends on, kept as long as the choice runs.

A row follows the choice's ids, prompt and output, which only ever grow; what it remembers of them is a function of them
alone. So one that is made anew after a preemption or on another worker continues as the old one would have.
"""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mesh.sampling import Sampling

if TYPE_CHECKING:
    from gpu_worker.engine.grammar import GrammarState
    from gpu_worker.engine.sequence import Sequence as Choice


class Row:
    """`ids` is the living list; its first `prompt_tokens` are the prompt. `ending_ids` end the choice by themselves."""

    __slots__ = ("_bias", "_known", "_output", "_seen", "choice", "ending_ids", "grammar", "ids", "plain",
                 "prompt_tokens", "sampling")  # fmt: skip

    def __init__(
        self,
        sampling: Sampling,
        choice: int,
        ids: Sequence[int],
        prompt_tokens: int,
        ending_ids: Sequence[int] = (),
        grammar: "GrammarState | None" = None,
    ) -> None:
        self.sampling = sampling
        self.choice = choice
        self.ids = ids
        self.prompt_tokens = prompt_tokens
        self.ending_ids = np.array(ending_ids, dtype=np.int64)
        self.grammar = grammar
        self._known = 0  # of ids, in _seen and _output
        self._seen = Tally() if sampling.repetition_penalty != 1 else None
        self._output = Tally() if sampling.presence_penalty or sampling.frequency_penalty else None
        self._bias = _bias_of(sampling)
        # Whether the likeliest token is the answer, and nothing more is asked, whatever came before.
        self.plain = (
            sampling.temperature == 0
            and sampling.top_logprobs is None
            and grammar is None
            and not (self._seen or self._output or self._bias)
            and not sampling.min_tokens
        )

    @property
    def position(self) -> int:
        """Output position of the token to choose."""
        return len(self.ids) - self.prompt_tokens

    def adjust(self, logits: np.ndarray) -> None:
        """Penalties, bias, minimum length and grammar of logits [V], in place. Raises GrammarFailed."""
        self._follow()
        if self._seen is not None:
            values = logits[self._seen.ids]
            penalty = np.float32(self.sampling.repetition_penalty)
            logits[self._seen.ids] = np.where(values > 0, values / penalty, values * penalty)
        if self._output is not None:
            penalties = self.sampling.presence_penalty + self.sampling.frequency_penalty * self._output.times
            logits[self._output.ids] -= penalties.astype(np.float32)
        if self._bias is not None:
            ids, bias = self._bias
            logits[ids] += bias
        early = self.position < self.sampling.min_tokens
        if self.grammar is not None:
            self.grammar.restrict(logits, self.ending_ids, early=early)
        elif early:
            logits[self.ending_ids] = -math.inf

    def _follow(self) -> None:
        """Take in the ids that came since. Raises GrammarFailed."""
        known, self._known = self._known, len(self.ids)
        if self._seen is not None:
            self._seen.add(self.ids[known:])
        if self._output is not None:
            self._output.add(self.ids[max(known, self.prompt_tokens) :])
        if self.grammar is not None:
            self.grammar.accept(self.ids[max(known, self.prompt_tokens) :])


class Tally:
    """Distinct tokens and how often each came, as arrays that grow by doubling."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._ids = np.zeros(64, dtype=np.int64)
        self._times = np.zeros(64, dtype=np.float32)

    @property
    def ids(self) -> np.ndarray:
        return self._ids[: len(self._slots)]

    @property
    def times(self) -> np.ndarray:
        return self._times[: len(self._slots)]

    def add(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            slot = self._slots.setdefault(token, len(self._slots))
            if slot == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._times = np.concatenate([self._times, np.zeros_like(self._times)])
            self._ids[slot] = token
            self._times[slot] += 1


def row_of(sequence: "Choice", ending_ids: Sequence[int]) -> Row:
    """The sequence's row, made when first asked for. `ending_ids` are the model's own."""
    if sequence.row is None:
        sampling, request = sequence.sampling, sequence.request
        endings = sampling.stop_token_ids if sampling.ignore_eos else (*sampling.stop_token_ids, *ending_ids)
        grammar = request.grammar.state() if request.grammar is not None else None
        prompt_tokens = len(request.plan.prompt_ids)
        sequence.row = Row(sampling, sequence.index, sequence.ids, prompt_tokens, endings, grammar)
    return sequence.row


def _bias_of(sampling: Sampling) -> tuple[np.ndarray, np.ndarray] | None:
    if not sampling.logit_bias:
        return None
    ids, bias = sampling.logit_bias.keys(), sampling.logit_bias.values()
    return np.array(list(ids), dtype=np.int64), np.array(list(bias), dtype=np.float32)
