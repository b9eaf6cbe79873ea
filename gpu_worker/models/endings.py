"""Which tokens end an answer."""

from pathlib import Path
from typing import Any

from gpu_worker.models.json_file import read_json
from mesh.models import ModelFolder


def eos_token_ids(folder: ModelFolder, named: Any, vocab_size: int) -> tuple[int, ...]:
    """All ids that end an answer: what the configurations say (`named`: the model's), and the tokenizer's `eos_token`.

    Chat models often end a turn with another token than the one their config.json names; the union is right.
    """
    found = _as_ids(named)
    generation = folder.path / "generation_config.json"
    if generation.is_file():
        found |= _as_ids(read_json(generation).get("eos_token_id"))
    if folder.tokenizer_config.is_file():
        token = read_json(folder.tokenizer_config).get("eos_token")
        found |= _id_of(token.get("content") if isinstance(token, dict) else token, folder.tokenizer)
    return tuple(sorted(token for token in found if 0 <= token < vocab_size))


def _as_ids(value: Any) -> set[int]:
    if value is None:
        return set()
    return {int(token) for token in value} if isinstance(value, list) else {int(value)}


def _id_of(token: str | None, tokenizer: Path) -> set[int]:
    if token is None or not tokenizer.is_file():
        return set()
    content = read_json(tokenizer)
    added = {entry["content"]: entry["id"] for entry in content.get("added_tokens", [])}
    vocab = content.get("model", {}).get("vocab", {})
    known = added | vocab if isinstance(vocab, dict) else added
    return {known[token]} if token in known else set()
