"""What a loader sees of a checkpoint, whichever format it is in: Hugging Face names, shapes and configuration.

GGUF files are translated to that form by gguf_file.py, so an architecture is written once.
"""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from gpu_worker.models.errors import LoadError
from gpu_worker.models.weight_file import WeightFile

Progress = Callable[[float, str], None]  # (fraction from 0 to 1, what is being done)


class Checkpoint(Protocol):
    """One model on disk. `source` is the file that speaks for its configuration, for error messages."""

    source: Path
    config: Mapping[str, Any]
    files: list[WeightFile]  # all that weights are read from

    def names(self) -> set[str]:
        """Every tensor's name."""

    def file_of(self, name: str) -> Path:
        """Where a tensor lies."""

    def bytes_of(self, name: str) -> int:
        """A tensor's size on disk."""

    def read(self, name: str) -> torch.Tensor:
        """A tensor in fp32. Raises LoadError if it is missing, damaged or of a kind that cannot be converted."""


class TensorReader:
    """Reads tensors once each, checks shape and values, and knows at the end what nobody asked for.

    Progress is by bytes on disk: a tensor is named before it is read, and counted when the next one is.
    """

    def __init__(self, checkpoint: Checkpoint, progress: Progress) -> None:
        self._checkpoint = checkpoint
        self._progress = progress
        self._names = checkpoint.names()
        self._unread = set(self._names)
        self._total = max(1, sum(checkpoint.bytes_of(name) for name in self._names))
        self._done = 0

    def has(self, name: str) -> bool:
        return name in self._names

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """The fp32 tensor. Raises LoadError unless it is there, has this shape and holds finite numbers only."""
        if name not in self._names:
            raise LoadError(self._checkpoint.source, f"missing; expected shape {list(shape)}", tensor=name)
        self._progress(min(1.0, self._done / self._total), name)
        tensor = self._checkpoint.read(name)
        file = self._checkpoint.file_of(name)
        if tuple(tensor.shape) != shape:
            problem = f"has shape {list(tensor.shape)}, but the configuration expects {list(shape)}"
            raise LoadError(file, problem, tensor=name)
        # A sum that is finite proves it for every weight without a second array; huge weights may fail it and be well.
        if not torch.isfinite(tensor.sum()) and not torch.isfinite(tensor).all():
            raise LoadError(file, "holds values that are not finite numbers: the file is damaged", tensor=name)
        self._unread.discard(name)
        self._done += self._checkpoint.bytes_of(name)
        return tensor

    def finish(self, ignored: Callable[[str], bool]) -> None:
        """Raise LoadError if a tensor was left over: a configuration that contradicts its weights."""
        left = sorted(name for name in self._unread if not ignored(name))
        if left:
            file = self._checkpoint.file_of(left[0])
            raise LoadError(file, f"has no place in the configuration ({len(left)} such tensors)", tensor=left[0])
        self._progress(1.0, "the last of the weights")


def content_digest(files: list[WeightFile], config: bytes) -> bytes:
    """32 bytes over the weights' content and the configuration: equal digests mean interchangeable KV."""
    digest = hashlib.blake2b(config, digest_size=32, person=b"shoal-model")
    for file in sorted(files, key=lambda file: file.path):
        digest.update(file.digest())
    return digest.digest()
