"""Writes a model folder's tokenizer files from what a GGUF carries: tokens, merges, token types, chat template.

A GGUF names its pre-tokenizer (`tokenizer.ggml.pre`) and leaves its definition to the reader. PRE_TOKENIZERS holds
those we know; an unknown one is refused, since wrong splits make a model worse without any error.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mesh.cli.problem import Problem

if TYPE_CHECKING:
    from gguf import GGUFReader
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

CONTROL, USER_DEFINED = 3, 4  # gguf.TokenType


def _digits_then_bytes() -> "PreTokenizer":
    """Each digit alone, then GPT-2's splits: SmolLM's own tokenizer.json, and `\\p{N}` + GPT-2 in llama.cpp."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)])


def _bytes() -> "PreTokenizer":
    from tokenizers.pre_tokenizers import ByteLevel

    return ByteLevel(add_prefix_space=False, use_regex=True)


PRE_TOKENIZERS: dict[str, Callable[[], "PreTokenizer"]] = {"smollm": _digits_then_bytes, "gpt-2": _bytes}


class Metadata:
    """A GGUF's key-value header."""

    def __init__(self, reader: "GGUFReader") -> None:
        self._fields = reader.fields

    def get(self, key: str, default: Any = None) -> Any:
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def token(self, name: str, tokens: list[str]) -> str | None:
        """The text of a special token: `bos`, `eos`, `unknown` or `padding`."""
        index = self.get(f"tokenizer.ggml.{name}_token_id")
        return None if index is None else tokens[index]


def write_tokenizer(gguf: Path, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json into `folder`.

    Raises Problem for a tokenizer that is not byte-level BPE or whose pre-tokenizer is unknown.
    """
    from gguf import GGUFReader

    metadata = Metadata(GGUFReader(gguf))
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    tokenizer_of(metadata, tokens).save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(metadata, tokens))
    _write_json(folder / "generation_config.json", _generation_config(metadata))


def tokenizer_of(metadata: Metadata, tokens: list[str]) -> "Tokenizer":
    """Byte-level BPE over the GGUF's vocabulary; ids are the GGUF's own."""
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.decoders import ByteLevel
    from tokenizers.models import BPE

    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2" or pre not in PRE_TOKENIZERS:
        raise Problem(
            f"this GGUF's tokenizer ({kind!r}, pre-tokenizer {pre!r}) cannot be converted",
            f"byte-level BPE with one of {sorted(PRE_TOKENIZERS)} can; or put the model's own tokenizer.json beside it",
        )
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", [])]
    tokenizer = Tokenizer(BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = ByteLevel()
    types = metadata.get("tokenizer.ggml.token_type", [])
    for token, token_type in zip(tokens, types, strict=False):
        if token_type == CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif token_type == USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False)])
    return tokenizer


def _tokenizer_config(metadata: Metadata, tokens: list[str]) -> dict[str, Any]:
    architecture = metadata.get("general.architecture")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": metadata.get("tokenizer.chat_template"),
        "bos_token": metadata.token("bos", tokens),
        "eos_token": metadata.token("eos", tokens),
        "unk_token": metadata.token("unknown", tokens),
        "pad_token": metadata.token("padding", tokens),
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
        "model_max_length": metadata.get(f"{architecture}.context_length"),
        "clean_up_tokenization_spaces": False,
    }
    return {key: value for key, value in config.items() if value is not None}


def _generation_config(metadata: Metadata) -> dict[str, Any]:
    """`eos_token_id` is a list: a chat model may end its turn with one token and its text with another."""
    ends = {metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")} - {None}
    config = {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": sorted(ends),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    return {key: value for key, value in config.items() if value is not None}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
