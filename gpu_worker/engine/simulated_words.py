"""What a simulated engine says: common words at random, an end now and then.

A token is a pure function of (seed, choice index, output position), at temperature 0 of the position alone. An answer
goes on after a preemption or on another worker as it would have here, like a real one; no prompt changes it.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_worker.engine.counted_random import bits
from gpu_worker.models.errors import LoadError
from gpu_worker.models.json_file import read_json
from mesh.sampling import Sampling

# A whole word with its leading space, as byte-level (Ġ) and sentencepiece (▁) vocabularies spell it.
_WORD = re.compile(r"[Ġ▁][a-z]{4,12}")
# Low ids are the commonest; fewer than LEAST_WORDS do not make a language, and any plain token will do.
MOST_WORDS, LEAST_WORDS = 1024, 64


class Words:
    """Draws tokens. `answer_tokens` is the mean length at which answers end by themselves; 0 = they never do."""

    def __init__(self, ids: Sequence[int], answer_tokens: float) -> None:
        self._ids = tuple(ids)
        # Each token ends the answer with the same chance, so lengths are geometric.
        self._ends_below = round((1 << 32) / max(1.0, answer_tokens)) if answer_tokens else 0

    def token(self, sampling: Sampling, choice: int, position: int, ending_ids: Sequence[int]) -> int:
        """The choice's token at an output position. `ending_ids` are the model's own; they may be none."""
        drawn = bits(sampling.seed or 0, choice, position) if sampling.temperature else bits(0, 0, position)
        early = position < sampling.min_tokens
        if ending_ids and drawn >> 32 < self._ends_below and not early and not sampling.ignore_eos:
            return ending_ids[0]
        at = drawn & 0xFFFFFFFF
        word = self._ids[at % len(self._ids)]
        if early and word in sampling.stop_token_ids:
            others = [one for one in self._ids if one not in sampling.stop_token_ids]
            return others[at % len(others)] if others else word
        return word


def word_ids(tokenizer: Path, vocab_size: int, ending_ids: Sequence[int]) -> list[int]:
    """Ids under `vocab_size` that read as words; of a vocabulary without words, any that mean no control.

    Raises LoadError if tokenizer.json is none, or leaves not one.
    """
    spellings, added = _vocabulary(tokenizer)
    controls = added | set(ending_ids)
    plain = sorted(token for token in spellings if 0 <= token < vocab_size and token not in controls)
    words = [token for token in plain if _WORD.fullmatch(spellings[token])]
    chosen = words if len(words) >= LEAST_WORDS else plain
    chosen = chosen or [token for token in range(min(vocab_size, MOST_WORDS)) if token not in controls]
    if not chosen:
        raise LoadError(tokenizer, "leaves no token that an answer could be made of")
    return chosen[:MOST_WORDS]


def vocabulary_size(tokenizer: Path) -> int:
    """One more than the highest id that tokenizer.json knows. Raises LoadError if it is none."""
    spellings, added = _vocabulary(tokenizer)
    return 1 + max((*spellings, *added), default=-1)


def _vocabulary(tokenizer: Path) -> tuple[dict[int, str], set[int]]:
    """Token by id, and the ids of added tokens; Unigram models keep pieces with scores, ids by position."""
    spec = read_json(tokenizer)
    added = {int(token["id"]) for token in spec.get("added_tokens") or []}
    vocab: Any = (spec.get("model") or {}).get("vocab") or {}
    if isinstance(vocab, dict):
        return {int(index): token for token, index in vocab.items()}, added
    return {index: piece for index, (piece, _) in enumerate(vocab)}, added
