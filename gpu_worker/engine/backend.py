"""What computes a loaded model's steps: the CPU kernels, or torch. Each knows a block's size before there are any."""

import os
from typing import Protocol

import torch

from gpu_worker.engine.config import EngineConfig
from gpu_worker.engine.native_runner import NativeRunner
from gpu_worker.engine.runner import Runner
from gpu_worker.engine.torch_runner import TorchRunner
from gpu_worker.engine.transfer import BlockStore
from gpu_worker.models.native_llama import NativeLlama
from gpu_worker.models.paged import PagedKv
from gpu_worker.models.registry import PRECISIONS, Decoder, LoadedModel


class Backend(Protocol):
    """From a number of blocks to what runs steps over them, and what they hold."""

    kv_dtype: str
    block_bytes: int

    def start(self, blocks: int) -> tuple[Runner, BlockStore]:
        """Make the pool and the runner."""


def backend_of(model: LoadedModel, config: EngineConfig) -> Backend:
    """The backend of a model that is loaded; `config` is settled."""
    if isinstance(model.decoder, NativeLlama):
        return NativeBackend(model.decoder, config)
    dtype = PRECISIONS[model.precision]
    assert dtype is not None  # else it could not have been loaded
    return TorchBackend(model.decoder, torch.device(config.device), dtype, model.precision)


class NativeBackend:
    """The CPU kernels."""

    def __init__(self, model: NativeLlama, config: EngineConfig) -> None:
        self._model = model
        self._threads = config.threads or os.cpu_count() or 1
        self._logits = config.max_sequences
        self._rows = config.prefill_chunk + config.max_sequences
        self.kv_dtype = model.kv_dtype
        self.block_bytes = model.block_bytes

    def start(self, blocks: int) -> tuple[Runner, BlockStore]:
        kv = self._model.kv(blocks)
        return NativeRunner(self._model, kv, self._threads, self._rows, self._logits), kv


class TorchBackend:
    """torch's operators, on any device."""

    def __init__(self, decoder: Decoder, device: torch.device, dtype: torch.dtype, precision: str) -> None:
        self._decoder, self._device, self._dtype = decoder, device, dtype
        self.kv_dtype = precision
        self.block_bytes = decoder.kv_shape.block_bytes(dtype)

    def start(self, blocks: int) -> tuple[Runner, BlockStore]:
        kv = PagedKv(self._decoder.kv_shape, blocks, self._device, self._dtype)
        return TorchRunner(self._decoder, kv, self._device, self._dtype), kv
