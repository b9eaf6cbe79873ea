"""The Llama architecture: RMSNorm, grouped-query attention, half-split RoPE, SwiGLU. Also what others derive from.

Shapes: T packed rows, D hidden, H query heads, K key-value heads, d head dimension, F feed-forward, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from gpu_worker.models.checkpoint import Checkpoint, Progress, TensorReader
from gpu_worker.models.errors import LoadError
from gpu_worker.models.linear import Linear, MakeLinear, dense
from gpu_worker.models.paged import Batch, KvShape, PagedKv, attend
from gpu_worker.models.rope import angles, inverse_frequencies, rotate
from gpu_worker.models.watch import Part, Watch


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


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: torch.Tensor  # [D]
    qkv: Linear  # D -> (H + 2K) d
    out: Linear  # H d -> D
    mlp_norm: torch.Tensor  # [D]
    gate_up: Linear  # D -> 2F
    down: Linear  # F -> D


class Llama:
    """A decoder over packed rows and paged KV. Weights are read once, at construction."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, progress: Progress) -> None:
        self.config = config = parse_config(checkpoint.config, checkpoint.source)
        self.kv_shape = KvShape(config.layers, config.kv_heads, config.head_dim, config.heads // config.kv_heads)
        self.vocab_size = config.vocab
        self.context_tokens = config.context
        reader = TensorReader(checkpoint, progress)
        make = dense(device, dtype)
        self._embedding = reader.take("model.embed_tokens.weight", config.vocab, config.hidden).to(device, dtype)
        self._layers = [_read_layer(reader, config, f"model.layers.{i}.", make, device) for i in range(config.layers)]
        self._norm = reader.take("model.norm.weight", config.hidden).to(device)
        if config.tied:
            self._head = make(self._embedding, None)
        else:
            self._head = make(reader.take("lm_head.weight", config.vocab, config.hidden), None)
        self._frequencies = rope_frequencies(config, checkpoint.source, reader).to(device)
        reader.finish(lambda name: name.endswith("rotary_emb.inv_freq") or (config.tied and name == "lm_head.weight"))

    def forward(self, batch: Batch, kv: PagedKv) -> torch.Tensor:
        """Write the rows' K and V and return fp32 logits [R, V] of batch.logit_rows."""
        x = self._embedding[batch.token_ids]  # [T, D]
        cos, sin = angles(batch.positions, self._frequencies)
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        watch = batch.watch
        _lap(watch, Part.OTHER)
        for index, layer in enumerate(self._layers):
            x = x + self._attention(index, layer, self._rms_norm(x, layer.input_norm), (cos, sin), batch, kv)
            _lap(watch, Part.ATTENTION)
            gate, up = layer.gate_up(self._rms_norm(x, layer.mlp_norm)).chunk(2, dim=-1)
            x = x + layer.down(functional.silu(gate) * up)
            _lap(watch, Part.FEED_FORWARD)
        rows = self._rms_norm(x[batch.logit_rows], self._norm)  # [R, D]
        return self._head(rows).float()

    def _attention(
        self,
        index: int,
        layer: _Layer,
        x: torch.Tensor,
        turn: tuple[torch.Tensor, torch.Tensor],
        batch: Batch,
        kv: PagedKv,
    ) -> torch.Tensor:
        heads, kv_heads, dim = self.config.heads, self.config.kv_heads, self.config.head_dim
        qkv = layer.qkv(x).view(len(x), heads + 2 * kv_heads, dim)
        turned = rotate(qkv[:, : heads + kv_heads], *turn)  # q and k in one go
        k, v = turned[:, heads:], qkv[:, heads + kv_heads :]
        kv.write(index, batch, torch.stack((k, v), dim=1))
        return layer.out(attend(turned[:, :heads], index, kv, batch))

    def _rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x / rms(x) * weight, computed in fp32."""
        return functional.rms_norm(x.float(), weight.shape, weight, self.config.eps).to(x.dtype)


def _lap(watch: Watch | None, part: Part) -> None:
    if watch is not None:
        watch.lap(part)


def _read_layer(
    reader: TensorReader, config: LlamaConfig, prefix: str, make: MakeLinear, device: torch.device
) -> _Layer:
    q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim

    def joined(parts: dict[str, int], columns: int, bias: bool) -> Linear:
        """Several projections of one input as one matmul."""
        weight = torch.cat([reader.take(f"{prefix}{name}.weight", rows, columns) for name, rows in parts.items()])
        biases = [reader.take(f"{prefix}{name}.bias", rows) for name, rows in parts.items()] if bias else []
        return make(weight, torch.cat(biases) if biases else None)

    attention = {"self_attn.q_proj": q_rows, "self_attn.k_proj": kv_rows, "self_attn.v_proj": kv_rows}
    gate_up = {"mlp.gate_proj": config.feed_forward, "mlp.up_proj": config.feed_forward}
    return _Layer(
        input_norm=reader.take(f"{prefix}input_layernorm.weight", config.hidden).to(device),
        qkv=joined(attention, config.hidden, config.qkv_bias),
        out=joined({"self_attn.o_proj": config.hidden}, q_rows, config.o_bias),
        mlp_norm=reader.take(f"{prefix}post_attention_layernorm.weight", config.hidden).to(device),
        gate_up=joined(gate_up, config.hidden, config.mlp_bias),
        down=joined({"mlp.down_proj": config.hidden}, config.feed_forward, config.mlp_bias),
    )


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
