"""A decoder's operations in the kernels' own terms: weights, rows, KV and the program that runs over them.

Thin wrappers that own what they made: an object keeps alive all that it was given, and frees its own with itself.
Shapes: T packed rows of a step, R of them with logits.
"""

import weakref
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_size_t, c_uint8, c_void_p
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.kernels.library import library
from gpu_worker.models.watch import Part

MAX_HEAD_DIM = 256  # kv_formats.h
# Looks at a flag before a waiting thread sleeps, some 10 ns each.
SPINS = 2000

Ints = npt.NDArray[np.int32]


class Format(IntEnum):
    """Number formats of weights, as linear.h numbers them."""

    FP32 = 0
    BF16 = 1
    INT8 = 2
    INT4 = 3


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "shoal_instructions": (c_char_p, []),
    "shoal_weights_new": (c_void_p, [c_int, c_int, c_int, c_void_p, c_void_p, c_void_p, c_void_p]),
    "shoal_weights_free": (None, [c_void_p]),
    "shoal_kv_new": (c_void_p, [c_int] * 5),
    "shoal_kv_free": (None, [c_void_p]),
    "shoal_kv_data": (c_void_p, [c_void_p]),
    "shoal_kv_block_bytes": (c_size_t, [c_void_p]),
    "shoal_rows_new": (c_void_p, [c_int, c_int]),
    "shoal_rows_free": (None, [c_void_p]),
    "shoal_rows_data": (c_void_p, [c_void_p]),
    "shoal_rows_stride": (c_int, [c_void_p]),
    "shoal_packed_new": (c_void_p, [c_int, c_int, c_int]),
    "shoal_packed_free": (None, [c_void_p]),
    "shoal_program_new": (c_void_p, [c_int] * 4),
    "shoal_program_free": (None, [c_void_p]),
    "shoal_embed": (None, [c_void_p, c_void_p, c_void_p, c_int, c_void_p]),
    "shoal_norm": (None, [c_void_p, c_int, c_void_p, c_void_p, c_float, c_void_p]),
    "shoal_pack": (None, [c_void_p, c_int, c_void_p, c_void_p]),
    "shoal_linear": (None, [c_void_p, c_int, c_void_p, c_void_p, c_void_p, c_int]),
    "shoal_swiglu": (None, [c_void_p, c_void_p, c_void_p, c_void_p]),
    "shoal_attention": (None, [c_void_p, c_void_p, c_int, c_int, c_float, *[c_void_p] * 6]),
    "shoal_choose": (None, [c_void_p, c_void_p, POINTER(c_int32), POINTER(c_uint8)]),
    "shoal_program_run": (c_int, [c_void_p, c_int, *[c_void_p] * 7]),
}


@cache
def kernels() -> Any:
    """The library with its signatures. Raises NoKernels."""
    lib = library()
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


def instructions() -> str:
    """Which instructions the kernels were compiled for, e.g. "avx512-bf16-vnni". Raises NoKernels."""
    return str(kernels().shoal_instructions().decode())


class _Owned:
    """Something the library made."""

    def __init__(self, kind: str, *arguments: Any) -> None:
        lib = kernels()
        self.handle: int = getattr(lib, f"shoal_{kind}_new")(*arguments)
        weakref.finalize(self, getattr(lib, f"shoal_{kind}_free"), self.handle)


def _fp32(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().to("cpu", torch.float32).contiguous()


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class Weights(_Owned):
    """A linear layer [out, in], packed in a format; with `gated` the halves of a pair of layers of equal shape."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        form: Format,
        gated: tuple[torch.Tensor, torch.Tensor | None] | None = None,
    ) -> None:
        outputs, inputs = weight.shape
        second, second_bias = gated if gated is not None else (None, None)
        given = [_fp32(one) for one in (weight, second, bias, second_bias)]
        count = outputs if gated is None else 2 * outputs
        super().__init__("weights", int(form), count, inputs, *map(_address, given))


class Rows(_Owned):
    """fp32 rows between operations, [rows, width]."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__("rows", rows, width)
        self.rows, self.width = rows, width

    def numpy(self) -> npt.NDArray[np.float32]:
        """[rows, width], the library's own memory: valid as long as this object."""
        stride = kernels().shoal_rows_stride(self.handle)
        data = (c_float * (self.rows * stride)).from_address(kernels().shoal_rows_data(self.handle))
        return np.frombuffer(data, np.float32).reshape(self.rows, stride)[:, : self.width]


class Packed(_Owned):
    """Rows as a linear layer of a format reads them; one serves all layers whose inputs have at most `inputs`."""

    def __init__(self, form: Format, rows: int, inputs: int) -> None:
        super().__init__("packed", int(form), rows, inputs)


class Kv(_Owned):
    """The pool's blocks, in fp32, bf16 or int8 (kv.h). Implements gpu_worker.engine.transfer.BlockStore.

    `head_dim` is at most MAX_HEAD_DIM; in int8 a multiple of 4.
    """

    def __init__(self, form: Format, blocks: int, layers: int, kv_heads: int, head_dim: int) -> None:
        super().__init__("kv", int(form), blocks, layers, kv_heads, head_dim)
        self.block_bytes: int = kernels().shoal_kv_block_bytes(self.handle)
        data = (c_uint8 * (blocks * self.block_bytes)).from_address(kernels().shoal_kv_data(self.handle))
        self._blocks = np.frombuffer(data, np.uint8).reshape(blocks, self.block_bytes)

    def read_block(self, block: int) -> memoryview:
        """A block's bytes: the pool's own memory."""
        return memoryview(self._blocks[block])

    def write_block(self, block: int, payload: bytes | bytearray | memoryview) -> None:
        """Replace a block by `payload` of block_bytes."""
        self._blocks[block] = np.frombuffer(payload, np.uint8)

    def copy_block(self, source: int, target: int) -> None:
        """`target` becomes equal to `source`."""
        self._blocks[target] = self._blocks[source]


def kv_block_bytes(form: Format, layers: int, kv_heads: int, head_dim: int) -> int:
    """Size of a block of a pool of this shape."""
    return Kv(form, 1, layers, kv_heads, head_dim).block_bytes


@dataclass(frozen=True, slots=True)
class Step:
    """What one run computes: for each piece of a sequence how many tokens from which position on, and its blocks.

    No two pieces may write to one block: the last token of a piece clears what follows it there.
    """

    counts: Ints  # [pieces]
    starts: Ints  # [pieces]
    offsets: Ints  # [pieces] where its blocks begin in `tables`
    tables: Ints  # [blocks of all pieces]
    samples: npt.NDArray[np.uint8]  # [pieces] whether the last token's logits are wanted
    tokens: Ints  # [T]


class Program:
    """Operations in order, each given the rows it reads and writes. Built once, run once a step."""

    def __init__(self, threads: int, max_rows: int, max_logits: int) -> None:
        self.max_rows, self.max_logits = max_rows, max_logits
        self._kernels = kernels()
        self._program = _Owned("program", threads, SPINS, max_rows, max_logits)
        self._kept: list[Any] = []  # what the operations point to
        self.tokens = np.zeros(max_logits, np.int32)  # [R] the likeliest of each row
        self.usable = np.zeros(max_logits, np.uint8)  # [R] whether a row holds only numbers
        self.seconds = np.zeros(len(Part), np.float64)  # by part, of the last timed run

    def rows(self, width: int) -> Rows:
        """Room for the step's rows."""
        return Rows(self.max_rows, width)

    def embed(self, table: torch.Tensor, out: Rows) -> None:
        """out = the tokens' rows of table [V, D], bf16 or fp32."""
        table = table.contiguous()
        bf16 = table.dtype is torch.bfloat16
        addresses = (table.data_ptr(), None) if bf16 else (None, table.data_ptr())
        self._add("shoal_embed", table, *addresses, table.shape[1], out)

    def norm(self, part: Part, x: Rows, weight: torch.Tensor, eps: float, out: Packed) -> None:
        """out = RMS norm of x, in fp32. Part.OTHER: before the head, only of rows that need logits."""
        padded = torch.zeros(-(-len(weight) // 64) * 64)
        padded[: len(weight)] = weight
        self._add("shoal_norm", padded, int(part), x, padded.data_ptr(), eps, out)

    def linear(self, part: Part, source: Packed, weights: Weights, out: Rows, add: bool = False) -> None:
        """out = source W^T + bias, or out += with `add`."""
        self._add("shoal_linear", None, int(part), source, weights, out, int(add))

    def swiglu(self, source: Packed, weights: Weights, out: Rows) -> None:
        """out = silu(gate) * up of gated weights."""
        self._add("shoal_swiglu", None, source, weights, out)

    def pack(self, part: Part, x: Rows, out: Packed) -> None:
        """out = x as a linear layer reads it."""
        self._add("shoal_pack", None, int(part), x, out)

    def attention(
        self, kv: Kv, layer: int, heads: int, scale: float, frequencies: torch.Tensor, rows: "AttentionRows"
    ) -> None:
        """Turn, store and attend (attention.h)."""
        frequencies = frequencies.float().contiguous()
        parts = (rows.qkv, rows.q, rows.turns, rows.out, rows.packed)
        self._add("shoal_attention", frequencies, kv, layer, heads, scale, frequencies.data_ptr(), *parts)

    def choose(self, logits: Rows) -> None:
        """Fill `tokens` and `usable`."""
        tokens = self.tokens.ctypes.data_as(POINTER(c_int32))
        usable = self.usable.ctypes.data_as(POINTER(c_uint8))
        self._add("shoal_choose", None, logits, tokens, usable)

    def run(self, step: Step, timed: bool = False) -> int:
        """Compute a step; the number of rows of logits, R. Raises ValueError if it is larger than the program."""
        arrays = (step.counts, step.starts, step.offsets, step.tables, step.samples, step.tokens)
        seconds = self.seconds.ctypes.data if timed else None
        addresses = [array.ctypes.data for array in arrays]
        rows: int = self._kernels.shoal_program_run(self._program.handle, len(step.counts), *addresses, seconds)
        if rows < 0:
            raise ValueError(f"a step of {len(step.tokens)} rows; the program has room for {self.max_rows}")
        return rows

    def _add(self, name: str, kept: Any, *arguments: Any) -> None:
        self._kept += [kept, *arguments]
        handles = [one.handle if isinstance(one, _Owned) else one for one in arguments]
        getattr(self._kernels, name)(self._program.handle, *handles)


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """The rows that attention reads, writes and works in; all layers may share them."""

    qkv: Rows  # [T, (heads + 2 kv_heads) * head_dim]
    q: Rows  # [T, heads * head_dim]
    turns: Rows  # [T, head_dim]: cos and sin of a row's angles, made by layer 0
    out: Rows  # [T, heads * head_dim]
    packed: Packed  # of `out`


def step_of(pieces: Sequence[tuple[int, Sequence[int], Sequence[int], bool]]) -> Step:
    """A step from (start, tokens, blocks, samples) of each piece."""
    counts = [len(tokens) for _, tokens, _, _ in pieces]
    sizes = np.array([0, *(len(blocks) for _, _, blocks, _ in pieces)], np.int32)
    return Step(
        counts=np.array(counts, np.int32),
        starts=np.array([start for start, _, _, _ in pieces], np.int32),
        offsets=np.cumsum(sizes, dtype=np.int32)[:-1].copy(),
        tables=np.array([block for _, _, blocks, _ in pieces for block in blocks], np.int32),
        samples=np.array([samples for _, _, _, samples in pieces], np.uint8),
        tokens=np.array([token for _, tokens, _, _ in pieces for token in tokens], np.int32),
    )
