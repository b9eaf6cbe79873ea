"""Prompts of a wanted length: common words, each one token in the vocabularies of today's models.

So a prompt of 256 words is 256 tokens, give or take what a chat template adds; the server's own count is reported.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from mesh.bench.answer import Ask

# One token each, with a space before it or without (a test holds the default model to that).
_LIST = (
    "and the for not you all can had her was one our out day get has him his how man new now old see two way who boy "
    "did its let put say she too use about after again air also an back because been before big call came come could "
    "down each end even find first from give go good great hand have help here high home house just keep kind know "
    "large last left life light like line little live long look made make many may mean men more most move much must "
    "name near need never next night number off only open other over own part people place point read right same school"
)
WORDS = _LIST.split()

BLOCK_WORDS = 512  # the trace format's block
# Words at a prompt's head that are drawn for it alone: more than a block of KV, so that no two prompts share a prefix.
OWN_WORDS = 24
_POOL_WORDS = 1 << 15


def text(words: int, rng: random.Random) -> str:
    """`words` words: a head drawn for this prompt, then a piece of a text drawn once, which costs next to nothing."""
    own = rng.choices(WORDS, k=max(1, min(words, OWN_WORDS)))
    left = words - len(own)
    while left > 0:
        start = rng.randrange(_POOL_WORDS)
        piece = _pool()[start : start + left]
        own += piece
        left -= len(piece)
    return " ".join(own)


@lru_cache(maxsize=1)
def _pool() -> list[str]:
    return random.Random(0).choices(WORDS, k=_POOL_WORDS)


@lru_cache(maxsize=4096)
def block_text(block_id: int) -> str:
    """The words of one block of a trace: the same for the same id, so that shared prefixes are really shared."""
    return text(BLOCK_WORDS, random.Random(block_id))


def text_of_blocks(blocks: Sequence[int], words: int) -> str:
    """`words` words made of whole blocks in order, the last one cut."""
    joined: list[str] = []
    left = words
    for block in blocks:
        if left <= 0:
            break
        part = block_text(block)
        joined.append(part if left >= BLOCK_WORDS else " ".join(part.split(" ", left)[:left]))
        left -= BLOCK_WORDS
    return " ".join(joined)


def endless(input_words: int, output_tokens: int, seed: int) -> Iterator[Ask]:
    """Requests of one shape for ever, no two alike."""
    rng = random.Random(seed)
    while True:
        yield Ask(prompt=text(input_words, rng), output_tokens=output_tokens)


def poisson(asks: Iterator[Ask], rate: float, seed: int) -> Iterator[Ask]:
    """`asks` as they arrive in a Poisson process of `rate` a second."""
    rng = random.Random(seed)
    at_s = 0.0
    for ask in asks:
        at_s += rng.expovariate(rate)
        yield replace(ask, at_s=at_s)
