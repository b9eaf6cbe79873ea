"""What a choice with a structure may say next: a grammar, and one state per choice that follows its tokens.

Grammars come ready compiled (grammar_compiler.py); here they are only walked. The state is a function of the tokens
that the choice has emitted, so it is rebuilt from them alone after a preemption or on another worker.
"""

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    import xgrammar

# Of one token's mask, seconds: a choice whose grammar is so ambiguous holds up everyone else in the batch, and ends.
SLOWEST_MASK_S = 0.5


class GrammarFailed(Exception):
    """This choice cannot go on; others with the same grammar may."""


class Grammar:
    """A compiled grammar over a vocabulary of `vocab_size` tokens. Shared by any number of choices."""

    def __init__(self, compiled: "xgrammar.CompiledGrammar", vocab_size: int) -> None:
        self.compiled = compiled
        self.vocab_size = vocab_size

    def state(self) -> "GrammarState":
        """At its beginning."""
        import xgrammar

        return GrammarState(xgrammar.GrammarMatcher(self.compiled), self.vocab_size)


class GrammarState:
    """Where one choice stands in its grammar."""

    def __init__(self, matcher: "xgrammar.GrammarMatcher", vocab_size: int) -> None:
        self._matcher = matcher
        self._bits = torch.zeros(1, -(-vocab_size // 32), dtype=torch.int32)  # a bit per token: may it come next?
        self._words = self._bits.numpy()[0].view(np.uint32)
        self._failed = ""

    def accept(self, tokens: Sequence[int]) -> None:
        """The choice has said `tokens`. Raises GrammarFailed if it may not have, then and ever after."""
        for token in tokens if not self._failed else ():
            try:
                accepted = self._matcher.accept_token(token)
            except RuntimeError as error:
                raise self._fail(str(error)) from error
            if not accepted:
                raise self._fail(f"token {token} is not what the grammar allows")
        if self._failed:
            raise GrammarFailed(self._failed)

    def _fail(self, why: str) -> GrammarFailed:
        self._failed = why
        return GrammarFailed(why)

    def restrict(self, logits: np.ndarray, ending_ids: np.ndarray, *, early: bool) -> None:
        """Leave of logits [V], in place, what may come next. Raises GrammarFailed.

        `ending_ids` are left where the grammar may end, and not `early` unless nothing else could come.
        """
        self._fill()
        self._clear(ending_ids)
        goes_on = bool(self._words.any())
        if self._matcher.is_completed() and not (early and goes_on):
            np.bitwise_or.at(self._words, ending_ids // 32, _bit(ending_ids))
        elif not goes_on:
            raise GrammarFailed("no token of the vocabulary can follow")
        allowed = np.unpackbits(self._bits.numpy()[0].view(np.uint8), bitorder="little", count=len(logits))
        logits[allowed == 0] = -math.inf

    def _fill(self) -> None:
        began_s = time.thread_time()
        try:
            self._matcher.fill_next_token_bitmask(self._bits)
        except RuntimeError as error:
            raise GrammarFailed(str(error)) from error
        if time.thread_time() - began_s > SLOWEST_MASK_S:
            raise GrammarFailed("the grammar takes too long per token")

    def _clear(self, ids: np.ndarray) -> None:
        np.bitwise_and.at(self._words, ids // 32, ~_bit(ids))


def _bit(ids: np.ndarray) -> np.ndarray:
    return np.left_shift(np.uint32(1), (ids % 32).astype(np.uint32), dtype=np.uint32)
