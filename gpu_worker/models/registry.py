"""From a model folder to a decoder: which format, which architecture."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from gpu_worker.models.checkpoint import Checkpoint, Progress, content_digest
from gpu_worker.models.endings import eos_token_ids
from gpu_worker.models.errors import LoadError
from gpu_worker.models.gguf_file import GgufCheckpoint
from gpu_worker.models.hf_folder import SafetensorsCheckpoint
from gpu_worker.models.llama import Llama
from gpu_worker.models.paged import Batch, KvShape, PagedKv
from mesh.models import ModelFolder


class Decoder(Protocol):
    """What the engine asks of an architecture."""

    kv_shape: KvShape
    vocab_size: int
    context_tokens: int

    def forward(self, batch: Batch, kv: PagedKv) -> torch.Tensor:
        """Write the rows' KV and return fp32 logits [R, V] of batch.logit_rows; a row depends on its sequence only."""


BuildDecoder = Callable[[Checkpoint, torch.device, torch.dtype, Progress], Decoder]

# Hugging Face's name of each architecture that can be served.
ARCHITECTURES: dict[str, BuildDecoder] = {"LlamaForCausalLM": Llama}
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder and what identifies it."""

    decoder: Decoder
    architecture: str
    digest: bytes
    eos_token_ids: tuple[int, ...]


def load(folder: ModelFolder, device: torch.device, precision: str, progress: Progress) -> LoadedModel:
    """Read a folder's weights onto a device. Raises LoadError."""
    progress(0.0, "opening the checkpoint")
    checkpoint = open_checkpoint(folder.path)
    names = checkpoint.config.get("architectures") or ["(none named)"]
    if names[0] not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise LoadError(checkpoint.source, f"unknown architecture {names[0]!r}; known: {known}")

    def weights(fraction: float, name: str) -> None:
        progress(0.9 * fraction, f"reading {name}")

    decoder = ARCHITECTURES[names[0]](checkpoint, device, PRECISIONS[precision], weights)
    progress(0.9, "hashing the weights")
    config = json.dumps(checkpoint.config, sort_keys=True).encode()
    digest = content_digest(checkpoint.files, config)
    return LoadedModel(
        decoder, names[0], digest, eos_token_ids(folder, checkpoint.config.get("eos_token_id"), decoder.vocab_size)
    )


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
