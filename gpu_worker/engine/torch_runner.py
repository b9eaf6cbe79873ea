"""The runner that computes: from pieces of sequences to one packed batch, through the model, to sampled tokens."""

from collections.abc import Sequence as Many
from functools import partial

import numpy as np
import torch

from gpu_worker.engine.api import Parts
from gpu_worker.engine.rows import row_of
from gpu_worker.engine.runner import TIMED_EVERY, Outcome
from gpu_worker.engine.sampler import sample
from gpu_worker.engine.sequence import Piece
from gpu_worker.models.paged import Batch, DecodeGroup, PagedKv, PrefillPiece
from gpu_worker.models.registry import Decoder
from gpu_worker.models.watch import Part, Watch
from mesh.blocks import BLOCK_TOKENS
from mesh.sampling import Sampling

GROUP_SPREAD = 1.5  # decodes share a gather while the longest has at most so many times the blocks of the shortest
GROUP_FLOOR = 8  # and below so many blocks always


class TorchRunner:
    """Owns the decoder and the pool's tensor. Implements gpu_worker.engine.runner.Runner."""

    def __init__(self, decoder: Decoder, kv: PagedKv, device: torch.device, dtype: torch.dtype) -> None:
        self._decoder = decoder
        self._kv = kv
        self._device = device
        self._dtype = dtype
        self._runs = 0
        self._parts: Parts | None = None

    def check(self, sampling: Sampling) -> None:
        """Whatever Sampling.check lets through can be honoured."""

    @torch.inference_mode()
    def clear(self, blocks: list[int]) -> None:
        """Zero blocks that sequences got for this step."""
        if blocks:
            self._kv.clear(blocks)

    @torch.inference_mode()
    def run(self, pieces: Many[Piece], ending_ids: Many[int]) -> list[Outcome]:
        """Compute the pieces in one forward pass. Raises whatever torch raises; nothing but KV was changed then."""
        watch, self._parts = self._watch(), None
        singles = sorted((p for p in pieces if p.count == 1), key=lambda piece: piece.start)
        ordered = singles + [p for p in pieces if p.count > 1]
        sampling = [piece for piece in ordered if piece.samples]
        logits = self._decoder.forward(self._batch(ordered, len(singles), watch), self._kv)
        if watch is not None:
            watch.lap(Part.OTHER)
        tokens = sample(logits, [row_of(piece.sequence, ending_ids) for piece in sampling]) if sampling else []
        if watch is not None:
            watch.lap(Part.SAMPLING)
            self._parts = _parts(watch)
        done = {id(p): Outcome.of(p, s) for p, s in zip(sampling, tokens, strict=True)}
        return [done.get(id(piece)) or Outcome(piece) for piece in pieces]

    def parts(self) -> Parts | None:
        """As the protocol says."""
        return self._parts

    def _watch(self) -> Watch | None:
        """For a run that is timed. On a GPU it makes the run wait for each part, which is why few are."""
        self._runs += 1
        if self._runs % TIMED_EVERY:
            return None
        return Watch(partial(torch.cuda.synchronize, self._device) if self._device.type == "cuda" else _nothing)

    def _batch(self, pieces: list[Piece], singles: int, watch: Watch | None) -> Batch:
        positions = np.concatenate([np.arange(p.start, p.start + p.count) for p in pieces])
        ends = np.cumsum([piece.count for piece in pieces])
        ids = [token for p in pieces for token in p.sequence.ids[p.start : p.start + p.count]]
        blocks = np.concatenate([_slots(piece) for piece in pieces])
        return Batch(
            token_ids=self._long(np.array(ids)),
            positions=self._long(positions),
            blocks=self._long(blocks),
            offsets=self._long(positions % BLOCK_TOKENS),
            logit_rows=self._long(np.array([end - 1 for p, end in zip(pieces, ends, strict=True) if p.samples])),
            decodes=[self._decode_group(pieces, first, last) for first, last in _groups(pieces[:singles])],
            prefills=[
                self._prefill_piece(piece, int(end) - piece.count)
                for piece, end in zip(pieces[singles:], ends[singles:], strict=True)
            ],
            watch=watch,
        )

    def _decode_group(self, pieces: list[Piece], first: int, last: int) -> DecodeGroup:
        group = pieces[first:last]
        lengths = np.array([piece.start + 1 for piece in group])
        width = -(-int(lengths.max()) // BLOCK_TOKENS)
        table = np.empty((len(group), width), dtype=np.int64)
        for row, piece in zip(table, group, strict=True):
            own = piece.sequence.blocks[:width]
            row[: len(own)] = own
            row[len(own) :] = own[-1]
        length = int(lengths.max())
        if int(lengths.min()) == length:
            return DecodeGroup(first, length, self._long(table), None)
        hidden = np.arange(length) >= lengths[:, None]  # [B, S]
        return DecodeGroup(first, length, self._long(table), self._mask(hidden)[:, None, None, :])

    def _prefill_piece(self, piece: Piece, first: int) -> PrefillPiece:
        length = piece.start + piece.count
        table = np.array([piece.sequence.blocks[: -(-length // BLOCK_TOKENS)]])
        hidden = np.arange(length) > np.arange(piece.start, length)[:, None]  # [count, S]
        rows = np.repeat(hidden, self._decoder.kv_shape.query_group, axis=0)
        return PrefillPiece(first, piece.count, length, self._long(table), self._mask(rows))

    def _mask(self, hidden: np.ndarray) -> torch.Tensor:
        mask = torch.zeros(hidden.shape, dtype=self._dtype)
        return mask.masked_fill_(torch.from_numpy(hidden), -torch.inf).to(self._device)

    def _long(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int64, copy=False)).to(self._device)


def _nothing() -> None:
    """A CPU has done what it was given when the call returns."""


def _parts(watch: Watch) -> Parts:
    attention_s, feed_forward_s, sampling_s, other_s = watch.seconds
    return Parts(attention_s=attention_s, feed_forward_s=feed_forward_s, sampling_s=sampling_s, other_s=other_s)


def _slots(piece: Piece) -> np.ndarray:
    """The block each of the piece's tokens goes to."""
    first, last = piece.start // BLOCK_TOKENS, (piece.start + piece.count - 1) // BLOCK_TOKENS
    blocks = np.repeat(np.array(piece.sequence.blocks[first : last + 1]), BLOCK_TOKENS)
    skip = piece.start % BLOCK_TOKENS
    return blocks[skip : skip + piece.count]


def _groups(singles: list[Piece]) -> list[tuple[int, int]]:
    """[first, last) ranges of decodes of similar length; `singles` are sorted by length."""
    starts = [0]
    for index, piece in enumerate(singles):
        shortest = singles[starts[-1]].start // BLOCK_TOKENS + 1
        if piece.start // BLOCK_TOKENS + 1 > max(GROUP_FLOOR, shortest * GROUP_SPREAD):
            starts.append(index)
    ends = [*starts[1:], len(singles)]
    return [(first, last) for first, last in zip(starts, ends, strict=True) if first < last]
