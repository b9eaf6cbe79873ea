"""A *.gguf file as a checkpoint with Hugging Face names: whatever the gguf library knows.

Two things differ from Hugging Face: names, and the rows of Llama's q and k projections, which llama.cpp's converter
interleaves for its RoPE (convert_hf_to_gguf.py, LlamaModel.permute). `read` undoes that.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gpu_worker.models.config_check import check_config
from gpu_worker.models.dequantize import Dequantizer
from gpu_worker.models.errors import LoadError
from gpu_worker.models.gguf_metadata import GgufMetadata
from gpu_worker.models.weight_file import WeightFile
from mesh.gguf_names import hf_name

if TYPE_CHECKING:
    from collections.abc import Mapping

_ARCHITECTURES = {"llama": "LlamaForCausalLM"}


class GgufCheckpoint:
    """One GGUF file, memory-mapped; a tensor is dequantized when read."""

    def __init__(self, path: Path) -> None:
        self.source = path
        self._metadata = GgufMetadata(path)
        # Names without a counterpart stay as they are, and are reported as left over.
        self._tensors = {hf_name(name) or name: place for name, place in self._metadata.tensors.items()}
        if len(self._tensors) < len(self._metadata.tensors):
            raise LoadError(path, "two of its tensors have one Hugging Face name; fetch it again")
        self._arch = self._metadata.architecture
        self.config: Mapping[str, Any] = self._hf_config()
        check_config(self.config, path)
        self.files = [WeightFile(path)]
        self._dequantizer = Dequantizer()

    def names(self) -> set[str]:
        return set(self._tensors)

    def file_of(self, name: str) -> Path:
        return self.source

    def bytes_of(self, name: str) -> int:
        return self._tensors[name].n_bytes

    def read(self, name: str) -> torch.Tensor:
        place = self._tensors[name]
        rows = self._metadata.data[place.offset : place.offset + place.n_bytes].reshape(*place.shape[:-1], -1)
        try:
            weight = torch.from_numpy(self._dequantizer.fp32(rows, place.kind))
        except NotImplementedError as error:
            raise LoadError(self.source, f"is of type {place.kind.name}: {error}", tensor=name) from error
        if self._arch == "llama":
            for projection, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
                if f".self_attn.{projection}." in name:
                    return _deinterleave(weight, self.config[heads], self.source, name)
        return weight

    def _hf_config(self) -> dict[str, Any]:
        if self._arch not in _ARCHITECTURES:
            raise LoadError(self.source, f"unknown architecture {self._arch!r}; known: {', '.join(_ARCHITECTURES)}")
        of, count_of = self._metadata.of, self._metadata.count_of
        heads, hidden = count_of("attention.head_count"), count_of("embedding_length")
        scaling = {"rope_type": "default", "rope_theta": of("rope.freq_base", 10000.0)}
        if (kind := of("rope.scaling.type", "none")) != "none":
            scaling |= {"rope_type": kind, "factor": of("rope.scaling.factor", 1.0)}
        return {
            "architectures": [_ARCHITECTURES[self._arch]],
            "hidden_size": hidden,
            "num_hidden_layers": count_of("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": count_of("attention.head_count_kv", heads),
            "head_dim": count_of("attention.key_length", max(1, hidden // heads)),
            "intermediate_size": count_of("feed_forward_length"),
            "max_position_embeddings": self._metadata.context_tokens,
            "rms_norm_eps": of("attention.layer_norm_rms_epsilon"),
            "vocab_size": self._metadata.vocab_size,
            "rope_parameters": scaling,
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
            "attention_bias": "model.layers.0.self_attn.o_proj.bias" in self._tensors,
            "qkv_bias": "model.layers.0.self_attn.q_proj.bias" in self._tensors,
            "eos_token_id": self._metadata.eos_token_ids,
        }


def _deinterleave(weight: torch.Tensor, heads: int, file: Path, name: str) -> torch.Tensor:
    """Rows (head, pair, half) back to (head, half, pair): the order half-split RoPE wants."""
    if weight.shape[0] % (2 * heads):
        raise LoadError(file, f"its {weight.shape[0]} rows do not divide into {heads} heads", tensor=name)
    paired = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return paired.transpose(1, 2).reshape(weight.shape).contiguous()
