"""The Llama architecture: RMSNorm, grouped-query attention, half-split RoPE, SwiGLU. Also what others derive from.

Shapes: T packed rows, D hidden, H query heads, K key-value heads, d head dimension, F feed-forward, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional

from gpu_worker.models.checkpoint import Checkpoint, Progress, TensorReader
from gpu_worker.models.linear import Linear, MakeLinear, dense
from gpu_worker.models.llama_config import parse_config, rope_frequencies
from gpu_worker.models.llama_weights import LayerWeights, joined, read_layer
from gpu_worker.models.paged import Batch, KvShape, PagedKv, attend
from gpu_worker.models.rope import angles, rotate
from gpu_worker.models.watch import Part, Watch


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
        self._layers = [_packed(read_layer(reader, config, index), make, device) for index in range(config.layers)]
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


def _packed(weights: LayerWeights, make: MakeLinear, device: torch.device) -> _Layer:
    return _Layer(
        input_norm=weights.input_norm.to(device),
        qkv=make(*weights.qkv),
        out=make(*weights.out),
        mlp_norm=weights.mlp_norm.to(device),
        gate_up=make(*joined(weights.gate, weights.up)),
        down=make(*weights.down),
    )
