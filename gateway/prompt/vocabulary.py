"""Reads tokenizer.json into what the gateway needs: a tokenizer that text cannot command, and every token's bytes.

Control tokens are those of the added ones that are marked special or read like a mark (`<think>`, `<｜User｜>`), in at
least two characters. Runs of spaces, single characters and plain words that a vocabulary was extended with are text.

`inert` encodes as the original does, but knows each control token by a stand-in: seven private-use characters, five of
them drawn at random in this process, so that no text can spell one. The tokens' own names are gone from its model too,
since a model may reach a name by merging (Llama's "</s>" is "</" + "s>").
"""

import json
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from gateway.prompt.token_bytes import Bytes, token_bytes
from mesh.errors import InvalidRequest

_PRIVATE_USE, _PRIVATE_USE_SIZE = 0xE000, 6400


@dataclass(frozen=True, repr=False)
class Vocabulary:
    """`stand_ins`: control token's text to its stand-in. `special`: ids that carry no text. `bytes_of`: see
    token_bytes, None for a decoder whose tokens have no bytes of their own. `longest_token`: the most UTF-8 bytes of a
    text, stand-ins included, that become one token.
    """

    full: Tokenizer
    inert: Tokenizer
    stand_ins: dict[str, str]
    special: frozenset[int]
    bytes_of: Bytes | None
    longest_token: int

    @classmethod
    def load(cls, path: Path) -> "Vocabulary":
        """From a tokenizer.json. Raises InvalidRequest (field `model`) if it is none."""
        try:
            spec = json.loads(path.read_text(encoding="utf-8"))
            full = Tokenizer.from_str(json.dumps({**spec, "truncation": None, "padding": None}))
        # tokenizers raises nothing narrower than Exception.
        except Exception as error:
            raise InvalidRequest(f"{path} cannot be read as a tokenizer: {error}", field="model") from error
        added = spec.get("added_tokens") or []
        table = token_bytes(full, spec.get("decoder"))
        stand_ins = _stand_ins([token["content"] for token in added if _is_control(token)])
        return cls(
            full=full,
            inert=Tokenizer.from_str(json.dumps(_renamed(spec, stand_ins))),
            stand_ins=stand_ins,
            special=frozenset(token["id"] for token in added if token["special"]),
            bytes_of=table,
            longest_token=max(map(len, [*_spelled(full, table), *map(str.encode, stand_ins.values())])),
        )


def _spelled(tokenizer: Tokenizer, table: Bytes | None) -> Bytes:
    """Every token's bytes; where the decoder has none, the token as it is written in the vocabulary."""
    return [token.encode() for token in tokenizer.get_vocab()] if table is None else table


def _is_control(token: dict[str, Any]) -> bool:
    text = token["content"]
    if len(text) < 2 or text.isspace():
        return False
    return token["special"] or not all(character.isalnum() or character.isspace() for character in text)


def _stand_ins(spellings: list[str]) -> dict[str, str]:
    secret = "".join(_private(secrets.randbelow(_PRIVATE_USE_SIZE)) for _ in range(5))
    return {
        spelling: secret + "".join(map(_private, divmod(index, _PRIVATE_USE_SIZE)))
        for index, spelling in enumerate(spellings)
    }


def _private(index: int) -> str:
    return chr(_PRIVATE_USE + index)


def _renamed(spec: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """The tokenizer with control tokens under other names, adding nothing of its own to a text."""
    added = [
        {**token, "content": names[token["content"]], "single_word": False} if token["content"] in names else token
        for token in spec.get("added_tokens") or []
    ]
    return {
        **spec,
        "added_tokens": added,
        "model": _renamed_model(spec["model"], names),
        "post_processor": None,
        "truncation": None,
        "padding": None,
    }


def _renamed_model(model: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    vocabulary = model["vocab"]
    renamed: dict[str, Any] = {**model}
    if isinstance(vocabulary, dict):
        renamed["vocab"] = {names.get(token, token): index for token, index in vocabulary.items()}
    else:  # Unigram: pieces with their scores, ids by position
        renamed["vocab"] = [[names.get(token, token), score] for token, score in vocabulary]
    if model.get("unk_token"):
        renamed["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        renamed["merges"] = [merge for merge in model["merges"] if not _names_one(merge, names)]
    return renamed


def _names_one(merge: str | list[str], names: dict[str, str]) -> bool:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left in names or right in names or left + right in names
