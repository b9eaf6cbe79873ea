"""Paged KV and attention over it: what one step looks like to a model.

The pool is one tensor [blocks, layers, 2, 16, kv_heads, head_dim], so a block with all its layers moves in one copy.
A step packs rows of many sequences: first all that compute one token (decodes), then pieces of prompts. Grouped-query
attention treats the query heads of one KV head as extra query rows, so K and V are never repeated.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from gpu_worker.models.watch import Watch
from mesh.blocks import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one token leaves behind."""

    layers: int
    kv_heads: int
    head_dim: int
    query_group: int  # query heads that share one KV head

    def block_bytes(self, dtype: torch.dtype) -> int:
        return self.layers * 2 * BLOCK_TOKENS * self.kv_heads * self.head_dim * dtype.itemsize


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences of similar length, one row each: rows [first, first + B) of the batch."""

    first: int
    length: int  # S, keys of the longest
    table: torch.Tensor  # [B, blocks] of block ids; short rows repeat a block of their own
    mask: torch.Tensor | None  # [B, 1, 1, S], 0 where a key exists, else -inf; None if all are as long


@dataclass(frozen=True, slots=True)
class PrefillPiece:
    """Consecutive tokens of one sequence: rows [first, first + count) of the batch."""

    first: int
    count: int
    length: int  # S, keys up to and including the last row's
    table: torch.Tensor  # [1, blocks]
    mask: torch.Tensor  # [count * query_group, S], 0 where a key is visible, else -inf


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's rows, packed. T rows in all, R of which need logits."""

    token_ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    blocks: torch.Tensor  # [T] where each row's K and V go
    offsets: torch.Tensor  # [T] place in that block
    logit_rows: torch.Tensor  # [R]
    decodes: list[DecodeGroup]
    prefills: list[PrefillPiece]
    watch: Watch | None = None  # where this step's parts are timed


class PagedKv:
    """The pool's tensor and what is done with it: write rows, gather pages, clear blocks, move blocks in and out."""

    def __init__(self, shape: KvShape, blocks: int, device: torch.device, dtype: torch.dtype) -> None:
        self.shape = shape
        size = (blocks, shape.layers, 2, BLOCK_TOKENS, shape.kv_heads, shape.head_dim)
        # Not zeroed: blocks are cleared as they are handed out, and pages that were never touched cost no memory.
        self._pool = torch.empty(size, device=device, dtype=dtype)
        self._pages = self._pool.view(blocks * shape.layers * 2, BLOCK_TOKENS * shape.kv_heads * shape.head_dim)
        self.block_bytes = shape.block_bytes(dtype)
        self._bytes = self._pool.view(blocks, -1).view(torch.uint8)  # [blocks, block_bytes]

    def write(self, layer: int, batch: Batch, kv: torch.Tensor) -> None:
        """Store kv [T, 2, kv_heads, head_dim] at the batch's slots."""
        self._pool[batch.blocks, layer, :, batch.offsets] = kv

    def gather(self, layer: int, table: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first `length` K and V of the blocks in table [B, n], each [B, kv_heads, length, head_dim]."""
        rows, count = table.shape
        keys = (table * self.shape.layers + layer).flatten() * 2
        size = (rows, count * BLOCK_TOKENS, self.shape.kv_heads, self.shape.head_dim)
        k = self._pages.index_select(0, keys).view(size)
        v = self._pages.index_select(0, keys + 1).view(size)
        return k[:, :length].transpose(1, 2), v[:, :length].transpose(1, 2)

    def read_block(self, block: int) -> memoryview:
        """A block's bytes: on a CPU the pool's own memory, else a copy. Implements engine.transfer.BlockStore."""
        return self._bytes[block].cpu().numpy().data

    def write_block(self, block: int, payload: bytes | bytearray | memoryview) -> None:
        """Replace a block by `payload` of block_bytes."""
        row = self._bytes[block]
        host = row if row.device.type == "cpu" else torch.empty_like(row, device="cpu")
        host.numpy()[:] = np.frombuffer(payload, np.uint8)
        if host is not row:
            row.copy_(host)

    def copy_block(self, source: int, target: int) -> None:
        """Make a block equal to another, byte for byte, without leaving the device."""
        self._bytes[target].copy_(self._bytes[source])

    def clear(self, blocks: list[int]) -> None:
        """Zero whole blocks before a sequence gets them.

        The unwritten end of a block is masked, but its values still meet the softmax's zeros, and 0 x NaN is NaN: one
        sequence's NaN must not reach the block's next owner.
        """
        self._pool.index_fill_(0, torch.tensor(blocks, device=self._pool.device), 0)


def attend(q: torch.Tensor, layer: int, kv: PagedKv, batch: Batch) -> torch.Tensor:
    """Attention of q [T, heads, head_dim] over each row's own sequence; returns [T, heads * head_dim]."""
    out = torch.empty_like(q)
    for group in batch.decodes:
        rows = slice(group.first, group.first + len(group.table))
        out[rows] = _decode(q[rows], layer, kv, group)
    for piece in batch.prefills:
        rows = slice(piece.first, piece.first + piece.count)
        out[rows] = _prefill(q[rows], layer, kv, piece)
    return out.flatten(1)


def _decode(q: torch.Tensor, layer: int, kv: PagedKv, group: DecodeGroup) -> torch.Tensor:
    """q [B, heads, head_dim], one token per sequence."""
    k, v = kv.gather(layer, group.table, group.length)
    grouped = q.view(len(q), kv.shape.kv_heads, -1, kv.shape.head_dim)  # [B, kv_heads, group, head_dim]
    return scaled_dot_product_attention(grouped, k, v, attn_mask=group.mask).reshape(q.shape)


def _prefill(q: torch.Tensor, layer: int, kv: PagedKv, piece: PrefillPiece) -> torch.Tensor:
    """q [count, heads, head_dim] of one sequence."""
    k, v = kv.gather(layer, piece.table, piece.length)
    count, heads, dim = q.shape
    grouped = q.view(count, kv.shape.kv_heads, -1, dim).transpose(0, 1).reshape(1, kv.shape.kv_heads, -1, dim)
    out = scaled_dot_product_attention(grouped, k, v, attn_mask=piece.mask)
    return out.view(kv.shape.kv_heads, count, -1, dim).transpose(0, 1).reshape(count, heads, dim)
