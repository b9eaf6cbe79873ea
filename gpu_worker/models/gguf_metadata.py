"""What a *.gguf file says of its model, read without its weights and without torch."""

from pathlib import Path
from typing import Any

import numpy as np

from gpu_worker.models.errors import LoadError
from gpu_worker.models.gguf_header import Strings, read_header


class GgufMetadata:
    """One memory-mapped file. Raises LoadError if it is damaged, or lacks what is asked for."""

    def __init__(self, path: Path) -> None:
        self.source = path
        try:
            # An empty file cannot be mapped. np.asarray: slicing a memmap is slow.
            self.data = np.asarray(np.memmap(path, mode="r")) if path.stat().st_size else np.empty(0, np.uint8)
        except OSError as error:
            raise LoadError(path, f"cannot be read: {error.strerror}") from error
        header = read_header(path, self.data)
        self.tensors = header.tensors
        self._values = header.values
        self.architecture: str = self.text("general.architecture")

    def field(self, key: str, default: Any = None) -> Any:
        """A value by its full key."""
        value = self._values.get(key, default)
        if value is None:
            raise LoadError(self.source, f"metadata lacks {key}")
        return value

    def of(self, key: str, default: Any = None) -> Any:
        """A value of the architecture's own, by the rest of its key."""
        return self.field(f"{self.architecture}.{key}", default)

    def text(self, key: str, default: str | None = None) -> str:
        """A string by its full key."""
        value = self.field(key, default)
        if not isinstance(value, str):
            raise LoadError(self.source, f"metadata {key} is {value!r}; expected a string")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A positive whole number by its full key."""
        value = self.field(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise LoadError(self.source, f"metadata {key} is {value!r}; expected a whole number above 0")
        return value

    def count_of(self, key: str, default: int | None = None) -> int:
        """A positive whole number of the architecture's own, by the rest of its key."""
        return self.count(f"{self.architecture}.{key}", default)

    @property
    def vocab_size(self) -> int:
        tokens = self._values.get("tokenizer.ggml.tokens")
        return tokens.count if isinstance(tokens, Strings) else self.count_of("vocab_size")

    @property
    def context_tokens(self) -> int:
        return self.count_of("context_length")

    @property
    def eos_token_ids(self) -> list[int]:
        keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
        ids = {key: self._values[key] for key in keys if key in self._values}
        for key, value in ids.items():
            if not isinstance(value, int) or isinstance(value, bool):
                raise LoadError(self.source, f"metadata {key} is {value!r}; expected a token id")
        return sorted(set(ids.values()))
