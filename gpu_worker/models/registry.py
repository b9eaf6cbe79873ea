"""From a model folder to a decoder: which format, which architecture."""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch

from gpu_worker.kernels.library import NoKernels
from gpu_worker.models.checkpoint import Checkpoint, Progress, content_digest
from gpu_worker.models.endings import eos_token_ids
from gpu_worker.models.errors import LoadError
from gpu_worker.models.gguf_file import GgufCheckpoint
from gpu_worker.models.hf_folder import SafetensorsCheckpoint
from gpu_worker.models.llama import Llama
from gpu_worker.models.native_llama import NativeLlama
from gpu_worker.models.paged import Batch, KvShape, PagedKv
from mesh.models import ModelFolder


class Decoder(Protocol):
    """What the engine asks of an architecture."""

    kv_shape: KvShape
    vocab_size: int
    context_tokens: int

    def forward(self, batch: Batch, kv: PagedKv) -> torch.Tensor:
        """Write the rows' KV and return fp32 logits [R, V] of batch.logit_rows; a row depends on its sequence only."""


log = logging.getLogger(__name__)

BuildDecoder = Callable[[Checkpoint, torch.device, torch.dtype, Progress], Decoder]
BuildNative = Callable[[Checkpoint, str, str, Progress], NativeLlama]
Kernels = Literal["auto", "native", "torch"]

# Hugging Face's name of each architecture that can be served: in torch, and by the CPU kernels.
ARCHITECTURES: dict[str, BuildDecoder] = {"LlamaForCausalLM": Llama}
NATIVE: dict[str, BuildNative] = {"LlamaForCausalLM": NativeLlama}

# Precisions, the most exact first, and what torch computes them in: None = only the CPU kernels do.
PRECISIONS: dict[str, torch.dtype | None] = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": None, "int4": None}
AUTO = "auto"
NATIVE_DEFAULT = "int8"  # docs/benchmarks.md says what it was chosen by


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder and what identifies it. `native`: its weights are packed for the CPU kernels."""

    decoder: Decoder | NativeLlama
    precision: str
    architecture: str
    digest: bytes
    eos_token_ids: tuple[int, ...]


def load(
    folder: ModelFolder,
    device: torch.device,
    precision: str,
    progress: Progress,
    kernels: Kernels = "auto",
    kv_precision: str = AUTO,
) -> LoadedModel:
    """Read a folder's weights onto a device, for the CPU kernels where there are some. Raises LoadError."""
    progress(0.0, "opening the checkpoint")
    checkpoint = open_checkpoint(folder.path)
    names = checkpoint.config.get("architectures") or ["(none named)"]
    if names[0] not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise LoadError(checkpoint.source, f"unknown architecture {names[0]!r}; known: {known}")

    def weights(fraction: float, name: str) -> None:
        progress(0.9 * fraction, f"reading {name}")

    wanted = _Wanted(device, precision, kv_precision, kernels)
    decoder, precision = _decoder(checkpoint, names[0], wanted, weights)
    progress(0.9, "hashing the weights")
    config = json.dumps(checkpoint.config, sort_keys=True).encode()
    digest = content_digest(checkpoint.files, config)
    endings = eos_token_ids(folder, checkpoint.config.get("eos_token_id"), decoder.vocab_size)
    return LoadedModel(decoder, precision, names[0], digest, endings)


@dataclass(frozen=True, slots=True)
class _Wanted:
    device: torch.device
    precision: str
    kv_precision: str
    kernels: Kernels


def _decoder(
    checkpoint: Checkpoint, name: str, wanted: _Wanted, progress: Progress
) -> tuple[Decoder | NativeLlama, str]:
    """The decoder, and the precision that it has come to."""
    device, precision = wanted.device, wanted.precision
    if wanted.kernels != "torch" and device.type == "cpu" and name in NATIVE:
        chosen = NATIVE_DEFAULT if precision == AUTO else precision
        try:
            return NATIVE[name](checkpoint, chosen, wanted.kv_precision, progress), chosen
        except NoKernels as reason:
            if wanted.kernels == "native":
                raise LoadError(checkpoint.source, f"needs the CPU kernels: {reason}") from reason
            log.warning("computing with torch alone, which is several times slower: %s", reason)
    chosen = ("bf16" if device.type == "cuda" else "fp32") if precision == AUTO else precision
    dtype = PRECISIONS[chosen]
    if dtype is None:
        problem = f"precision {chosen} needs the CPU kernels, which this device or machine has not; try bf16"
        raise LoadError(checkpoint.source, problem)
    if wanted.kv_precision not in (AUTO, chosen):
        problem = f"kv_precision {wanted.kv_precision} needs the CPU kernels: torch keeps KV in {chosen}; try auto"
        raise LoadError(checkpoint.source, problem)
    return ARCHITECTURES[name](checkpoint, device, dtype, progress), chosen


def open_checkpoint(folder: Path) -> Checkpoint:
    """The one GGUF file or the safetensors of a folder. Raises LoadError."""
    ggufs = sorted(folder.glob("*.gguf"))
    if len(ggufs) > 1:
        raise LoadError(folder, f"holds {len(ggufs)} GGUF files; expected one")
    if ggufs:
        return GgufCheckpoint(ggufs[0])
    if any(folder.glob("*.safetensors")) or (folder / "model.safetensors.index.json").is_file():
        return SafetensorsCheckpoint(folder)
    raise LoadError(folder, "holds no weights; expected one *.gguf or *.safetensors with config.json")
