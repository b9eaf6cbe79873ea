"""The bytes that each token of a vocabulary stands for, where its decoder is one of the two that work on bytes.

- ByteLevel (GPT-2, Llama 3, Qwen, DeepSeek, SmolLM): a token is written in 256 printable characters, one per byte. The
  table is OpenAI's `bytes_to_unicode` (github.com/openai/gpt-2, src/encoder.py).
- ByteFallback (Llama 2, Mistral, Gemma): a token is text in which ▁ is a space, or one byte written `<0xE5>`.

Bytes per token are what makes incremental text exact: they are joined and decoded as a stream, so that no state but an
unfinished character crosses a step.
"""

import re
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

Bytes = Sequence[bytes]
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def token_bytes(tokenizer: Tokenizer, decoder: dict[str, Any] | None) -> Bytes | None:
    """Bytes by token id, b"" for ids that are nobody's; None if `decoder` does not work on bytes."""
    kinds = _kinds(decoder)
    if kinds == ["ByteLevel"]:
        of = _byte_level
    elif "ByteFallback" in kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        of = _byte_fallback
    else:
        return None
    table = [b""] * (max(tokenizer.get_vocab().values(), default=-1) + 1)
    for token, index in tokenizer.get_vocab().items():
        table[index] = of(token)
    return table


def _kinds(decoder: dict[str, Any] | None) -> list[str]:
    if decoder is None:
        return []
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return [part["type"] for part in parts]


def _characters() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 and on."""
    themselves = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in themselves]
    return {chr(byte): byte for byte in themselves} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTES = _characters()


def _byte_level(token: str) -> bytes:
    """An added token may hold characters outside the alphabet; then it is plain text, as tokenizers has it."""
    try:
        return bytes(_BYTES[character] for character in token)
    except KeyError:
        return token.encode()


def _byte_fallback(token: str) -> bytes:
    if (match := _BYTE_TOKEN.fullmatch(token)) is not None:
        return bytes.fromhex(match.group(1))
    return token.replace("▁", " ").encode()
