"""The real tokenizer, and small ones of the other kinds made on the spot."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.prompt.text_model import TextModel
from mesh import models
from mesh.errors import InvalidRequest


@pytest.fixture(scope="session")
def folder() -> models.ModelFolder:
    try:
        return models.find(models.DEFAULT_MODEL)
    except InvalidRequest as error:
        pytest.fail(f"these tests use the real tokenizer: {error.message}")


@pytest.fixture(scope="session")
def model(folder: models.ModelFolder) -> TextModel:
    return TextModel.load(folder)


class Reference:
    """transformers' tokenizer of the same folder."""

    def __init__(self, folder: models.ModelFolder) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(folder.path)
        self.special_tokens: list[str] = list(self._tokenizer.added_tokens_encoder)

    def chat_ids(self, chat: list[dict[str, str]]) -> list[int]:
        return list(self._tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"])

    def chat_text(self, chat: list[dict[str, str]]) -> str:
        return str(self._tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))

    def text_ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text)["input_ids"])

    def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))


@pytest.fixture(scope="session")
def reference(folder: models.ModelFolder) -> Reference:
    return Reference(folder)


def added(index: int, content: str, *, special: bool = True, rstrip: bool = False) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": rstrip, "normalized": False, "special": special}
    return {"id": index, "content": content, **flags}


def llama_like() -> dict[str, Any]:
    """Sentencepiece's kind: ▁ for spaces, bytes for what is not in the vocabulary, and merges that reach "</s>"."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"<>/sabcdefghi|[]", "</", "s>", "ab", "▁ab", "<think>", "[INST]"]
    return {
        "version": "1.0",
        "added_tokens": [
            added(0, "<unk>"),
            added(1, "<s>"),
            added(2, "</s>"),
            added(pieces.index("<think>"), "<think>", special=False),
            added(pieces.index("[INST]"), "[INST]", rstrip=True),
        ],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "byte_fallback": True,
            "fuse_unk": True,
            "vocab": {piece: index for index, piece in enumerate(pieces)},
            "merges": [["a", "b"], ["▁", "ab"], ["<", "/"], ["s", ">"], ["</", "s>"]],
        },
    }


def word_pieces() -> dict[str, Any]:
    """BERT's kind, whose decoder has no bytes."""
    words = ["[UNK]", "[SEP]", "un", "##do", "##ing", "do", "the", "été", ",", "."]
    return {
        "version": "1.0",
        "added_tokens": [added(0, "[UNK]"), added(1, "[SEP]")],
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {word: index for index, word in enumerate(words)},
        },
    }


Make = Callable[..., TextModel]


@pytest.fixture(scope="session")
def made_in() -> Make:
    """A model of a made tokenizer ("llama" or "words"), in a folder, with the given tokenizer_config.json."""

    def made(path: Path, kind: str, **config: Any) -> TextModel:
        spec = {"llama": llama_like, "words": word_pieces}[kind]()
        (path / "tokenizer.json").write_text(json.dumps(spec))
        (path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 512, **config}))
        return TextModel.load(models.ModelFolder("made", path))

    return made


@pytest.fixture
def make(tmp_path: Path, made_in: Make) -> Make:
    """As `made_in`, in a folder of the test's own."""
    return functools.partial(made_in, tmp_path)
