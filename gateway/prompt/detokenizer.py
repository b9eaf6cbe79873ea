"""Token ids to text, a few at a time, as if all had been decoded at once.

`push` returns whole characters only; the start of one is carried to the next push. Bytes that can be no part of a
character become U+FFFD where they stand, as in any decoder. If the answer ends inside a character, `finish` returns one
U+FFFD for what there is of it, in a streamed answer and in one piece alike; its tokens count as any others. Special
tokens carry no text.

An answer goes on where its prompt ended, so a space at its start (Llama 2's first "▁Paris") is kept.
"""

import codecs
from collections.abc import Sequence
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


class ByteDetokenizer:
    """For decoders that work on bytes: looks tokens up and decodes UTF-8 incrementally. `texts` has b"" for special
    ones.
    """

    def __init__(self, texts: Bytes) -> None:
        self._texts = texts
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Sequence[int]) -> str:
        """The characters that `ids` complete. An id outside the vocabulary (padded logits) has no text."""
        size = len(self._texts)
        return self._decoder.decode(b"".join([self._texts[token] for token in ids if token < size]))

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
