"""Which tokens end an answer."""

from pathlib import Path
from typing import Any

import msgspec

from gpu_worker.models.errors import LoadError
from gpu_worker.models.json_file import read_json
from mesh.models import ModelFolder


class _Added(msgspec.Struct):
    id: int
    content: str


class _AddedTokens(msgspec.Struct):
    """Of tokenizer.json only this: a whole vocabulary takes ten times as long to make."""

    added_tokens: list[_Added] | None = None


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[Any] | None = None  # a list is Unigram's: pieces with scores, ids by position


class _Vocabulary(msgspec.Struct):
    model: _Model | None = None


def eos_token_ids(folder: ModelFolder, named: Any, vocab_size: int) -> tuple[int, ...]:
    """All ids that end an answer: what the configurations say (`named`: the model's), and the tokenizer's `eos_token`.

    Chat models often end a turn with another token than the one their config.json names; the union is right. Raises
    LoadError for a file that says nothing usable of it, tokenizer.json included.
    """
    found = _as_ids(named, folder.path)
    generation = folder.path / "generation_config.json"
    if generation.is_file():
        found |= _as_ids(read_json(generation).get("eos_token_id"), generation)
    token = _eos_token(folder.tokenizer_config) if folder.tokenizer_config.is_file() else None
    if folder.tokenizer.is_file():
        found |= _id_of(token, folder.tokenizer)
    return tuple(sorted(token for token in found if 0 <= token < vocab_size))


def _as_ids(value: Any, file: Path) -> set[int]:
    listed = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in listed):
        raise LoadError(file, f"eos_token_id is {value!r}; expected token ids")
    return set(listed)


def _eos_token(tokenizer_config: Path) -> str | None:
    token = read_json(tokenizer_config).get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if text is not None and not isinstance(text, str):
        raise LoadError(tokenizer_config, f"eos_token is {token!r}; expected a token's text")
    return text


def _id_of(token: str | None, tokenizer: Path) -> set[int]:
    try:
        content = tokenizer.read_bytes()
        added = msgspec.json.decode(content, type=_AddedTokens).added_tokens or []
        known = {entry.content: entry.id for entry in added}
        if token is not None and token not in known:
            model = msgspec.json.decode(content, type=_Vocabulary).model
            vocab = model.vocab if model is not None else None
            known |= vocab if isinstance(vocab, dict) else {}
    except OSError as error:
        raise LoadError(tokenizer, f"cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise LoadError(tokenizer, f"is no tokenizer: {error}") from error
    return {known[token]} if token in known else set()
