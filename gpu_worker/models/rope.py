"""Rotary position embedding, half-split ("NEOX") form, with the frequency scalings that checkpoints ask for."""

import math
from collections.abc import Mapping
from typing import Any

import torch


def inverse_frequencies(head_dim: int, rope: Mapping[str, Any]) -> torch.Tensor:
    """Radians per position of each pair, fp32 [head_dim / 2]. Raises KeyError or ValueError on an unknown scaling."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / (float(rope["rope_theta"]) ** exponent)
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return plain
    if kind == "linear":
        return plain / float(rope["factor"])
    if kind == "llama3":
        return _llama3(plain, rope)
    raise ValueError(f"unknown rope scaling {kind!r}; known: default, linear, llama3")


def _llama3(plain: torch.Tensor, rope: Mapping[str, Any]) -> torch.Tensor:
    """Llama 3.1: long wavelengths slowed by `factor`, short ones kept, a linear blend between."""
    factor, original = float(rope["factor"]), float(rope["original_max_position_embeddings"])
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    turns = original * plain / (2 * math.pi)  # how often a pair turns over the original context
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return plain / factor * (1 - keep) + plain * keep


def angles(positions: torch.Tensor, frequencies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin), each fp32 [T, 1, head_dim], for positions [T]; one per step serves every layer."""
    half = positions.float()[:, None] * frequencies  # [T, head_dim / 2]
    both = torch.cat((half, half), dim=-1)[:, None, :]
    return both.cos(), both.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, heads, head_dim] turned by its row's angles."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
