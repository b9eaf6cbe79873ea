"""A vocabulary of single characters for the tiny model, so that it can speak any language of printable ASCII."""

import json
from pathlib import Path

from mesh.models import ModelFolder

VOCAB, EOS = 97, 2
CONTROL = ["<unk>", "<s>", "</s>"]
CHARACTERS = [chr(code) for code in range(32, 126)]


def spoken_folder(path: Path) -> ModelFolder:
    """A folder with a tokenizer.json of VOCAB tokens."""
    vocab = {token: index for index, token in enumerate(CONTROL + CHARACTERS)}
    added = [{"id": index, "content": token, "special": True} for index, token in enumerate(CONTROL)]
    tokenizer = {"model": {"type": "BPE", "vocab": vocab, "merges": []}, "added_tokens": added, "decoder": None}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return ModelFolder("tiny", path)


def ids_of(text: str) -> list[int]:
    return [len(CONTROL) + CHARACTERS.index(character) for character in text]


def text_of(ids: list[int]) -> str:
    return "".join(CHARACTERS[index - len(CONTROL)] for index in ids)
