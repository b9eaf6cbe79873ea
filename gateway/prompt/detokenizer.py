"""Token ids to text, a few at a time, as if all had been decoded at once.

`push` returns whole characters only; the start of one is carried to the next push. Bytes that can be no part of a
character become U+FFFD where they stand, as in any decoder. If the answer ends inside a character, `finish` returns one
U+FFFD for what there is of it, in a streamed answer and in one piece alike; its tokens count as any others. Special
tokens carry no text.

An answer goes on where its prompt ended, so a space at its start (Llama 2's first "▁Paris") is kept.
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tokenizers import Tokenizer

from gateway.prompt.token_bytes import Bytes

REPLACEMENT = "\ufffd"
# Tokens decoded again for context by a decoder without bytes; also the most that wait for a character's end.
CONTEXT_TOKENS = 6


class Detokenizer(Protocol):
    """One choice's text. Not for use after `finish`."""

    def push(self, ids: Sequence[int]) -> str: ...

    def finish(self) -> str: ...


@dataclass(frozen=True, repr=False)
class TokenTexts:
    """By token: its bytes, b"" for a special one, and its text where these are whole characters by themselves."""

    raw: Bytes
    whole: Sequence[str | None]

    @classmethod
    def of(cls, raw: Bytes) -> "TokenTexts":
        return cls(raw, list(map(_whole, raw)))


def _whole(raw: bytes) -> str | None:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


class ByteDetokenizer:
    """For decoders that work on bytes: looks tokens up and decodes UTF-8 incrementally."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._inside = False  # a character has begun and not ended

    def push(self, ids: Sequence[int]) -> str:
        """The characters that `ids` complete. An id outside the vocabulary (padded logits) has no text."""
        raw = self._texts.raw
        size = len(raw)
        # The common case by look-up alone: one token, and nothing of a character on either side of it.
        if len(ids) == 1 and not self._inside and ids[0] < size and (text := self._texts.whole[ids[0]]) is not None:
            return text
        decoded = self._decoder.decode(b"".join([raw[token] for token in ids if token < size]))
        self._inside = bool(self._decoder.getstate()[0])
        return decoded

    def finish(self) -> str:
        """One U+FFFD for an unfinished character, or nothing."""
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For any other decoder: decodes a window of the last tokens with and without the new ones; the text is the
    difference.

    The window begins at a token whose text was delivered whole, so what a decoder does at the start of a text
    (stripping a space) falls out of the difference.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window = list(prompt_ids[-CONTEXT_TOKENS:])
        self._delivered = len(self._window)

    def push(self, ids: Sequence[int]) -> str:
        """As ByteDetokenizer.push. Taken singly, so that the text does not depend on how they arrive."""
        return "".join(map(self._push, ids))

    def _push(self, token: int) -> str:
        self._window.append(token)
        text = self._new_text()
        waiting = len(self._window) - self._delivered
        if text.endswith(REPLACEMENT) and waiting < CONTEXT_TOKENS:
            return ""
        if text:
            del self._window[: self._delivered]
            self._delivered = len(self._window)
        return text

    def finish(self) -> str:
        """What waited for a character's end."""
        text = self._new_text()
        self._delivered = len(self._window)
        return text.rstrip(REPLACEMENT) + REPLACEMENT if text.endswith(REPLACEMENT) else text

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._window[: self._delivered], skip_special_tokens=True)
        return str(self._tokenizer.decode(self._window, skip_special_tokens=True))[len(before) :]
