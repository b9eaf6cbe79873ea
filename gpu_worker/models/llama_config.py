"""A Llama's configuration, checked: sizes, biases, and the frequencies of its RoPE."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpu_worker.models.checkpoint import TensorReader
from gpu_worker.models.errors import LoadError
from gpu_worker.models.rope import inverse_frequencies


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """A checked configuration."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocab: int
    context: int
    eps: float
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    rope: Mapping[str, Any]


def parse_config(config: Mapping[str, Any], source: Path) -> LlamaConfig:
    """Raises LoadError on a missing field or fields that contradict each other."""
    try:
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        bias = bool(config.get("attention_bias", False))
        parsed = LlamaConfig(
            hidden=hidden,
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            feed_forward=int(config["intermediate_size"]),
            vocab=int(config["vocab_size"]),
            context=int(config["max_position_embeddings"]),
            eps=float(config["rms_norm_eps"]),
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=bool(config.get("qkv_bias", bias)),
            o_bias=bias,
            mlp_bias=bool(config.get("mlp_bias", False)),
            rope=_rope_of(config),
        )
    except KeyError as error:
        raise LoadError(source, f"lacks {error.args[0]}") from error
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise LoadError(source, f"holds a value of the wrong kind: {error}") from error
    if config.get("hidden_act", "silu") != "silu":
        raise LoadError(source, f"hidden_act is {config['hidden_act']!r}; expected 'silu'")
    if min(parsed.layers, parsed.kv_heads, parsed.head_dim, parsed.vocab, parsed.context) < 1 or parsed.head_dim % 2:
        raise LoadError(source, "sizes must be positive and head_dim even")
    if parsed.heads % parsed.kv_heads:
        raise LoadError(source, f"{parsed.heads} attention heads cannot share {parsed.kv_heads} key-value heads")
    return parsed


def _rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE's parameters from either spelling: `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling`."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    rope.setdefault("rope_type", rope.get("type", "default"))
    return rope


def rope_frequencies(config: LlamaConfig, source: Path, reader: TensorReader) -> torch.Tensor:
    """Inverse frequencies; a GGUF file carries llama3 scaling as divisors in rope_freqs.weight."""
    try:
        frequencies = inverse_frequencies(config.head_dim, config.rope)
    except KeyError as error:
        raise LoadError(source, f"its rope scaling lacks {error.args[0]}") from error
    except ValueError as error:
        raise LoadError(source, str(error)) from error
    if reader.has("rope_freqs.weight"):
        frequencies = frequencies / reader.take("rope_freqs.weight", config.head_dim // 2)
    return frequencies
