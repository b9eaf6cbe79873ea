"""The Llama architecture as a program of CPU kernels. models/llama.py is the same in torch, for comparison.

Weights are packed as they are read, so a model needs its packed size and one tensor more. The residual stream, norms
and softmax are fp32 in every precision; a precision says in which format weights, the inputs of linear layers, and KV
are kept.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from gpu_worker.kernels.library import NoKernels
from gpu_worker.kernels.program import (
    MAX_HEAD_DIM,
    AttentionRows,
    Format,
    Kv,
    Packed,
    Program,
    Rows,
    Weights,
    kv_block_bytes,
)
from gpu_worker.models.checkpoint import Checkpoint, Progress, TensorReader
from gpu_worker.models.errors import LoadError
from gpu_worker.models.llama_config import parse_config, rope_frequencies
from gpu_worker.models.llama_weights import LayerWeights, read_layer
from gpu_worker.models.paged import KvShape
from gpu_worker.models.watch import Part

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

FORMATS = {"fp32": Format.FP32, "bf16": Format.BF16, "int8": Format.INT8, "int4": Format.INT4}


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: torch.Tensor  # [D]
    qkv: Weights  # D -> (H + 2K) d
    out: Weights  # H d -> D
    mlp_norm: torch.Tensor  # [D]
    gate_up: Weights  # D -> F and F
    down: Weights  # F -> D


class NativeLlama:
    """Packed weights, and the program over them. Raises LoadError like Llama, NoKernels where there are none.

    `kv_precision` "auto" is that of the weights, and for fewer bits than int8 has int8.
    """

    def __init__(self, checkpoint: Checkpoint, precision: str, kv_precision: str, progress: Progress) -> None:
        self.config = config = parse_config(checkpoint.config, checkpoint.source)
        if config.head_dim > MAX_HEAD_DIM:
            raise NoKernels(f"heads of {config.head_dim} are more than the {MAX_HEAD_DIM} that they can do")
        self.kv_shape = KvShape(config.layers, config.kv_heads, config.head_dim, config.heads // config.kv_heads)
        self.vocab_size = config.vocab
        self.context_tokens = config.context
        self.format = FORMATS[precision]
        self.kv_format = _kv_format(self.format, kv_precision, config.head_dim, checkpoint.source)
        # Four bits are too few for the head, which chooses among all tokens: alone it cost 0.8 of perplexity. What
        # attention puts out suffers most from being rounded to bytes, and its layer is a tenth of the weights.
        self.head_format = Format.INT8 if self.format is Format.INT4 else self.format
        self.out_format = Format.BF16 if self.format is Format.INT4 else self.format
        reader = TensorReader(checkpoint, progress)
        embedding = reader.take("model.embed_tokens.weight", config.vocab, config.hidden)
        self._layers = [self._packed(read_layer(reader, config, index)) for index in range(config.layers)]
        self._norm = reader.take("model.norm.weight", config.hidden)
        head = embedding if config.tied else reader.take("lm_head.weight", config.vocab, config.hidden)
        self._head = Weights(head, None, self.head_format)
        self._embedding = embedding if self.format is Format.FP32 else embedding.bfloat16()
        self._frequencies = rope_frequencies(config, checkpoint.source, reader)
        reader.finish(lambda name: name.endswith("rotary_emb.inv_freq") or (config.tied and name == "lm_head.weight"))

    @property
    def kv_dtype(self) -> str:
        """KV's format, in the kernels' own layout, which no other engine could read."""
        return f"{self.kv_format.name.lower()}_tiled"

    @property
    def block_bytes(self) -> int:
        """Of a block of the pool."""
        shape = self.kv_shape
        return kv_block_bytes(self.kv_format, shape.layers, shape.kv_heads, shape.head_dim)

    def kv(self, blocks: int) -> Kv:
        """A pool of blocks for this model."""
        shape = self.kv_shape
        return Kv(self.kv_format, blocks, shape.layers, shape.kv_heads, shape.head_dim)

    def program(self, kv: Kv, threads: int, max_rows: int, max_logits: int) -> "LlamaProgram":
        """The model over a pool, for steps of at most `max_rows` tokens and `max_logits` rows of logits."""
        config, program = self.config, Program(threads, max_rows, max_logits)
        x, gated = program.rows(config.hidden), program.rows(config.feed_forward)
        attention_width = config.heads * config.head_dim
        packed = Packed(self.format, max_rows, max(config.hidden, config.feed_forward))
        rows = AttentionRows(
            qkv=program.rows((config.heads + 2 * config.kv_heads) * config.head_dim),
            q=program.rows(attention_width),
            turns=program.rows(config.head_dim),
            out=program.rows(attention_width),
            packed=Packed(self.out_format, max_rows, attention_width),
        )
        program.embed(self._embedding, x)
        for index, layer in enumerate(self._layers):
            program.norm(Part.ATTENTION, x, layer.input_norm, config.eps, packed)
            program.linear(Part.ATTENTION, packed, layer.qkv, rows.qkv)
            program.attention(kv, index, config.heads, config.head_dim**-0.5, self._frequencies, rows)
            program.linear(Part.ATTENTION, rows.packed, layer.out, x, add=True)
            program.norm(Part.FEED_FORWARD, x, layer.mlp_norm, config.eps, packed)
            program.swiglu(packed, layer.gate_up, gated)
            program.pack(Part.FEED_FORWARD, gated, packed)
            program.linear(Part.FEED_FORWARD, packed, layer.down, x, add=True)
        logits = Rows(max_logits, config.vocab)
        last = Packed(self.head_format, max_logits, config.hidden)
        program.norm(Part.OTHER, x, self._norm, config.eps, last)
        program.linear(Part.OTHER, last, self._head, logits)
        program.choose(logits)
        return LlamaProgram(program, logits.numpy())

    def _packed(self, weights: LayerWeights) -> _Layer:
        return _Layer(
            input_norm=weights.input_norm,
            qkv=Weights(*weights.qkv, self.format),
            out=Weights(*weights.out, self.out_format),
            mlp_norm=weights.mlp_norm,
            gate_up=Weights(*weights.gate, self.format, gated=weights.up),
            down=Weights(*weights.down, self.format),
        )


def _kv_format(weights: Format, wanted: str, head_dim: int, source: Path) -> Format:
    """Bytes of KV come in fours. Raises LoadError if they were asked for and cannot be had."""
    if wanted == "auto":
        form = min(weights, Format.INT8)
        return Format.BF16 if form is Format.INT8 and head_dim % 4 else form
    if FORMATS[wanted] is Format.INT8 and head_dim % 4:
        raise LoadError(source, f"kv_precision int8 needs heads of a multiple of 4, not {head_dim}; try bf16")
    return FORMATS[wanted]


@dataclass(frozen=True, slots=True)
class LlamaProgram:
    """What runs, and where its logits are: [max_logits, V], the first R of them those of the last run."""

    program: Program
    logits: "npt.NDArray[np.float32]"
