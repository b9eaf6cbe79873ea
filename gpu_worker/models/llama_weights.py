"""A Llama layer's weights under Hugging Face's names, as whoever computes with them wants them joined."""

from dataclasses import dataclass

import torch

from gpu_worker.models.checkpoint import TensorReader
from gpu_worker.models.llama_config import LlamaConfig

Pair = tuple[torch.Tensor, torch.Tensor | None]  # weight [out, in], bias [out] or None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """fp32, as read."""

    input_norm: torch.Tensor  # [D]
    qkv: Pair  # D -> (H + 2K) d
    out: Pair  # H d -> D
    mlp_norm: torch.Tensor  # [D]
    gate: Pair  # D -> F
    up: Pair  # D -> F
    down: Pair  # F -> D


def read_layer(reader: TensorReader, config: LlamaConfig, index: int) -> LayerWeights:
    """Raises LoadError for what is missing or of another shape."""
    prefix = f"model.layers.{index}."
    q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim

    def read(name: str, rows: int, columns: int, bias: bool) -> Pair:
        weight = reader.take(f"{prefix}{name}.weight", rows, columns)
        return weight, reader.take(f"{prefix}{name}.bias", rows) if bias else None

    sizes = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}
    return LayerWeights(
        input_norm=reader.take(f"{prefix}input_layernorm.weight", config.hidden),
        qkv=joined(*(read(f"self_attn.{name}", rows, config.hidden, config.qkv_bias) for name, rows in sizes.items())),
        out=read("self_attn.o_proj", config.hidden, q_rows, config.o_bias),
        mlp_norm=reader.take(f"{prefix}post_attention_layernorm.weight", config.hidden),
        gate=read("mlp.gate_proj", config.feed_forward, config.hidden, config.mlp_bias),
        up=read("mlp.up_proj", config.feed_forward, config.hidden, config.mlp_bias),
        down=read("mlp.down_proj", config.hidden, config.feed_forward, config.mlp_bias),
    )


def joined(*parts: Pair) -> Pair:
    """Several projections of one input as one matmul."""
    biases = [bias for _, bias in parts if bias is not None]
    return torch.cat([weight for weight, _ in parts]), torch.cat(biases) if biases else None
