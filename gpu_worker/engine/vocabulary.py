"""A model's vocabulary as grammars need it: what each token says, and which say nothing."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import xgrammar


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]


class _Tokenizer(msgspec.Struct):
    """The part of tokenizer.json that counts here."""

    model: _Model
    added_tokens: list[_AddedToken] = []
    decoder: Any = None


def tokenizer_info(path: Path, vocab_size: int, end_ids: list[int]) -> "xgrammar.TokenizerInfo":
    """For compiling and for following grammars. `end_ids` end an answer.

    Control tokens and ids that are nobody's say nothing, so that no grammar ever lets them through as text. Raises
    msgspec.DecodeError or OSError where tokenizer.json is none.
    """
    import xgrammar

    tokenizer = msgspec.json.decode(path.read_bytes(), type=_Tokenizer)
    vocab = tokenizer.model.vocab
    said = vocab if isinstance(vocab, dict) else {token: index for index, (token, _) in enumerate(vocab)}
    table = [""] * vocab_size
    for token, index in (said | {added.content: added.id for added in tokenizer.added_tokens}).items():
        if index < vocab_size:
            table[index] = token
    for added in tokenizer.added_tokens:
        if added.special and added.id < vocab_size:
            table[added.id] = ""
    return xgrammar.TokenizerInfo(table, _kind(tokenizer.decoder), vocab_size=vocab_size, stop_token_ids=end_ids)


def _kind(decoder: Any) -> "xgrammar.VocabType":
    """How tokens are written (gateway/prompt/token_bytes.py tells of both ways)."""
    import xgrammar

    parts = decoder.get("decoders", [decoder]) if isinstance(decoder, dict) else []
    kinds = {part.get("type") for part in parts}
    if "ByteLevel" in kinds:
        return xgrammar.VocabType.BYTE_LEVEL
    return xgrammar.VocabType.BYTE_FALLBACK if "ByteFallback" in kinds else xgrammar.VocabType.RAW
