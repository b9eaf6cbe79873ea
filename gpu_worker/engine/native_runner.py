"""The runner of the CPU kernels: from pieces of sequences to one call of the model's program, to sampled tokens."""

import time
from collections.abc import Sequence as Many
from itertools import chain

import numpy as np
import torch

from gpu_worker.engine.api import Parts
from gpu_worker.engine.rows import row_of
from gpu_worker.engine.runner import TIMED_EVERY, Outcome
from gpu_worker.engine.sampler import sample
from gpu_worker.engine.sequence import Piece, blocks_for
from gpu_worker.kernels.program import Kv, Step
from gpu_worker.models.native_llama import LlamaProgram, NativeLlama
from gpu_worker.models.watch import Part
from mesh.sampling import Sampling


class NativeRunner:
    """Owns the model's program over the pool. Implements gpu_worker.engine.runner.Runner.

    The program has room for `rows` tokens and `logits` choices a step; a larger step has it made anew, larger.
    """

    def __init__(self, model: NativeLlama, kv: Kv, threads: int, rows: int, logits: int) -> None:
        self._model = model
        self._kv = kv
        self._threads = threads
        self._compiled = model.program(kv, threads, rows, logits)
        self._runs = 0
        self._parts: Parts | None = None

    def check(self, sampling: Sampling) -> None:
        """Whatever Sampling.check lets through can be honoured."""

    def clear(self, blocks: list[int]) -> None:
        """Nothing to do: attention reads no slot that was not written."""

    def run(self, pieces: Many[Piece], ending_ids: Many[int]) -> list[Outcome]:
        """Compute the pieces in one call; nothing but their KV has changed if sampling raises."""
        began_s = time.perf_counter()
        self._runs += 1
        timed = self._runs % TIMED_EVERY == 0
        sampling = [piece for piece in pieces if piece.samples]
        compiled = self._room_for(sum([piece.count for piece in pieces]), len(sampling))
        program = compiled.program
        rows = program.run(_step_of(pieces), timed)
        computed_s = time.perf_counter()
        greedy = (program.tokens[:rows].tolist(), program.usable[:rows].tolist())
        logits = torch.from_numpy(compiled.logits[:rows])
        tokens = sample(logits, [row_of(piece.sequence, ending_ids) for piece in sampling], greedy) if sampling else []
        chosen = iter(tokens)
        outcomes = [Outcome.of(piece, next(chosen)) if piece.samples else Outcome(piece) for piece in pieces]
        self._parts = _parts(program.seconds, time.perf_counter() - computed_s, began_s) if timed else None
        return outcomes

    def parts(self) -> Parts | None:
        """As the protocol says."""
        return self._parts

    def _room_for(self, rows: int, logits: int) -> LlamaProgram:
        program = self._compiled.program
        if rows > program.max_rows or logits > program.max_logits:
            rows, logits = max(rows, program.max_rows), max(logits, program.max_logits)
            self._compiled = self._model.program(self._kv, self._threads, rows, logits)
        return self._compiled


def _step_of(pieces: Many[Piece]) -> Step:
    tables = [piece.sequence.blocks[: blocks_for(piece.start + piece.count)] for piece in pieces]
    ends = np.cumsum([len(table) for table in tables], dtype=np.int32)
    starts = [piece.start for piece in pieces]
    tokens = [piece.sequence.ids[piece.start : piece.start + piece.count] for piece in pieces]
    return Step(
        counts=np.array([piece.count for piece in pieces], np.int32),
        starts=np.array(starts, np.int32),
        offsets=np.concatenate(([0], ends[:-1])).astype(np.int32),
        tables=np.fromiter(chain.from_iterable(tables), np.int32, int(ends[-1])),
        samples=np.array([piece.samples for piece in pieces], np.uint8),
        tokens=np.fromiter(chain.from_iterable(tokens), np.int32),
    )


def _parts(seconds: np.ndarray, sampling_s: float, began_s: float) -> Parts:
    """All that the kernels and the sampler did not take is other, too."""
    attention_s, feed_forward_s = float(seconds[Part.ATTENTION]), float(seconds[Part.FEED_FORWARD])
    sampling_s += float(seconds[Part.SAMPLING])
    rest_s = time.perf_counter() - began_s - attention_s - feed_forward_s - sampling_s
    return Parts(
        attention_s=attention_s, feed_forward_s=feed_forward_s, sampling_s=sampling_s, other_s=max(0.0, rest_s)
    )
