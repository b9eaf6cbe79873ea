"""What a *.gguf file says of its model, read without its weights and without torch."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from gpu_worker.models.errors import LoadError

_DAMAGE = (ValueError, IndexError, KeyError, OSError, OverflowError, TypeError)  # what GGUFReader raises on bad bytes


class _PlainReader(gguf.GGUFReader):
    """GGUFReader over a plain array: slicing np.memmap is slow, and a vocabulary takes 250,000 slices."""

    @property  # type: ignore[override]
    def data(self) -> np.ndarray:
        return self._data

    @data.setter
    def data(self, mapped: np.ndarray) -> None:
        self._data = np.asarray(mapped)


class GgufMetadata:
    """One memory-mapped file. Raises LoadError if it is damaged, or lacks what is asked for."""

    def __init__(self, path: Path) -> None:
        self.source = path
        try:
            self.reader = _PlainReader(path)
        except _DAMAGE as error:
            raise LoadError(path, f"not a whole GGUF file ({error}); fetch it again") from error
        self.architecture = str(self.field("general.architecture"))

    def field(self, key: str, default: Any = None) -> Any:
        """A value by its full key."""
        field = self.reader.get_field(key)
        if field is not None:
            return field.contents()
        if default is None:
            raise LoadError(self.source, f"metadata lacks {key}")
        return default

    def of(self, key: str, default: Any = None) -> Any:
        """A value of the architecture's own, by the rest of its key."""
        return self.field(f"{self.architecture}.{key}", default)

    @property
    def vocab_size(self) -> int:
        tokens = self.reader.get_field("tokenizer.ggml.tokens")
        return len(tokens.data) if tokens is not None else int(self.of("vocab_size"))

    @property
    def context_tokens(self) -> int:
        return int(self.of("context_length"))

    @property
    def eos_token_ids(self) -> list[int]:
        keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
        return sorted({int(self.field(key)) for key in keys if self.reader.get_field(key) is not None})
