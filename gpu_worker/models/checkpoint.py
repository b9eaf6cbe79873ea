"""What a loader sees of a checkpoint, whichever format it is in: Hugging Face names, shapes and configuration.

GGUF files are translated to that form by gguf_file.py, so an architecture is written once.
"""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from gpu_worker.models.errors import LoadError

Progress = Callable[[float, str], None]  # (fraction from 0 to 1, what is being done)


class Checkpoint(Protocol):
    """One model on disk. `source` is the file that speaks for its configuration, for error messages."""

    source: Path
    config: Mapping[str, Any]
    files: list[Path]  # all that weights are read from

    def names(self) -> set[str]:
        """Every tensor's name."""

    def file_of(self, name: str) -> Path:
        """Where a tensor lies."""

    def read(self, name: str) -> torch.Tensor:
        """A tensor in fp32. Raises LoadError if it is missing, damaged or of a kind that cannot be converted."""


class TensorReader:
    """Reads tensors once each, checks shape and values, and knows at the end what nobody asked for."""

    def __init__(self, checkpoint: Checkpoint, progress: Progress) -> None:
        self._checkpoint = checkpoint
        self._progress = progress
        self._unread = checkpoint.names()
        self._total = max(1, len(self._unread))

    def has(self, name: str) -> bool:
        return name in self._checkpoint.names()

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """The fp32 tensor. Raises LoadError unless it is there, has this shape and holds finite numbers only."""
        if name not in self._checkpoint.names():
            raise LoadError(self._checkpoint.source, f"missing; expected shape {list(shape)}", tensor=name)
        tensor = self._checkpoint.read(name)
        file = self._checkpoint.file_of(name)
        if tuple(tensor.shape) != shape:
            problem = f"has shape {list(tensor.shape)}, but the configuration expects {list(shape)}"
            raise LoadError(file, problem, tensor=name)
        if not torch.isfinite(tensor.sum()):  # a sum of finite weights is finite, and takes no second array
            raise LoadError(file, "holds values that are not finite numbers: the file is damaged", tensor=name)
        self._unread.discard(name)
        self._progress(1 - len(self._unread) / self._total, name)
        return tensor

    def finish(self, ignored: Callable[[str], bool]) -> None:
        """Raise LoadError if a tensor was left over: a configuration that contradicts its weights."""
        left = sorted(name for name in self._unread if not ignored(name))
        if left:
            file = self._checkpoint.file_of(left[0])
            raise LoadError(file, f"has no place in the configuration ({len(left)} such tensors)", tensor=left[0])


def content_digest(files: list[Path], config: bytes) -> bytes:
    """32 bytes over the weights' content and the configuration: equal digests mean interchangeable KV."""
    digest = hashlib.blake2b(config, digest_size=32, person=b"shoal-model")
    for path in sorted(files):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "blake2b").digest())
    return digest.digest()
