"""Keeps what users write apart from what the template writes, so that nobody can spell a control token.

A template joins both into one text, in which `<|im_end|>` is the end of a turn whoever wrote it. So, before rendering,
every text that a user sent (tool results, tool schemas and system texts too) has a sentinel put between the characters
of any control token's spelling, and at an end where a spelling could be completed by what the template puts next to it.
The sentinel is a private-use character that occurs in none of these texts. What still reads as a control token
afterwards is the template's own; it is replaced by its stand-in, the sentinels are taken out, and a tokenizer that
knows the control tokens by their stand-ins only (gateway/prompt/vocabulary.py) encodes the result in one go, just as
the original would.

A template that looks for a mark in a user's text (`content.split('</think>')`) does not find one that was broken so:
what a client sends back as content is content.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile

# Plane 15; stand-ins use the private-use area of plane 0.
_SENTINELS = range(0xF0000, 0xFFFFE)


class ControlTokens:
    """`stand_ins` maps each control token's spelling (two characters or more) to its stand-in."""

    def __init__(self, stand_ins: Mapping[str, str]) -> None:
        self._stand_ins = dict(stand_ins)
        spellings = sorted(self._stand_ins)
        self.spelled = re.compile(_any_of(spellings) if spellings else "(?!)")
        self._beginnings = _marks(s[:n] for s in spellings for n in range(1, len(s)))
        self._endings = _marks(s[n:] for s in spellings for n in range(1, len(s)))
        self._longest = max(map(len, spellings), default=1)

    def guard(self, texts: Iterable[str], template: str) -> "Guard | None":
        """What keeps `texts`, all that a user sent, from being read as control tokens; None if none could be."""
        texts = list(texts)
        if not any(self.spelled.search(text) or self.starts_open(text) or self.ends_open(text) for text in texts):
            return None
        used = set(template).union(*texts)
        return Guard(self, next(chr(code) for code in _SENTINELS if chr(code) not in used))

    def marked(self, rendered: str, guard: "Guard | None" = None) -> str:
        """`rendered` with the template's control tokens as stand-ins, and without the guard's sentinels."""
        marked = self.spelled.sub(lambda match: self._stand_ins[match.group()], rendered)
        return marked.replace(guard.sentinel, "") if guard else marked

    def starts_open(self, text: str) -> bool:
        """Whether `text` begins as some control token ends."""
        return any(text[:n] in self._endings for n in range(1, min(self._longest, len(text) + 1)))

    def ends_open(self, text: str) -> bool:
        """Whether `text` ends as some control token begins."""
        return any(text[-n:] in self._beginnings for n in range(1, min(self._longest, len(text) + 1)))


@dataclass(frozen=True, slots=True)
class Guard:
    """Breaks spellings of control tokens with a character that the request's texts and the template do not have."""

    control: ControlTokens
    sentinel: str

    def __call__(self, text: str) -> str:
        """`text`, in which nothing spells a control token, nor will together with what is put next to it."""
        head = self.sentinel if self.control.starts_open(text) else ""
        tail = self.sentinel if self.control.ends_open(text) else ""
        # Again until none is left: breaking one may leave another that overlapped it.
        while self.control.spelled.search(text):
            text = self.control.spelled.sub(lambda match: self.sentinel.join(match.group()), text)
        return head + text + tail


def _marks(parts: Iterable[str]) -> frozenset[str]:
    """Without plain letters and digits: half the words of a language begin or end as some token does (GLM's "sop")."""
    return frozenset(part for part in parts if not part.isalnum())


def _any_of(words: Sequence[str]) -> str:
    """A pattern for the longest of the sorted `words`, sharing their beginnings.

    A plain alternation tries every word at each "<": for 2 MB of text and DeepSeek's 800 tokens, 0.9 s in which nothing
    else runs. This takes 30 ms.
    """
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(words[0], words[-1], strict=False)))
    rests = [word[shared:] for word in words]
    branches = [_any_of(list(group)) for _, group in groupby(filter(None, rests), key=lambda rest: rest[0])]
    if not branches:
        return re.escape(words[0])
    return f"{re.escape(words[0][:shared])}(?:{'|'.join(branches)}){'?' if '' in rests else ''}"
