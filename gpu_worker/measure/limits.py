"""What this machine can do at best, measured by loops that do nothing else: bounds for what an engine's step takes."""

import time
from collections.abc import Callable

import torch

READ_BYTES = 1 << 29  # far beyond any cache
READ_TRIES = 5
MATMUL_TRIES = 10
# (rows, in, out) of int8 matmuls: the projections of a small model, many rows at a time.
MATMULS = ((1024, 576, 3072), (1024, 1536, 576))


def read_gb_per_s() -> float:
    """Memory read by a sum over a large array, GB/s, the best of several."""
    array = torch.ones(READ_BYTES // 4)
    return READ_BYTES / _best_s(lambda: array.sum(), READ_TRIES) / 1e9


def int8_gop_per_s() -> float:
    """int8 x int8 → int32 matmuls, 10^9 multiplications and additions a second, the best of several."""
    return max(_int8_gop_per_s(*shape) for shape in MATMULS)


def _int8_gop_per_s(rows: int, width: int, out: int) -> float:
    left = torch.randint(-127, 128, (rows, width), dtype=torch.int8)
    right = torch.randint(-127, 128, (width, out), dtype=torch.int8)
    return 2 * rows * width * out / _best_s(lambda: torch._int_mm(left, right), MATMUL_TRIES) / 1e9


def _best_s(work: Callable[[], object], tries: int) -> float:
    work()
    best = float("inf")
    for _ in range(tries):
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best
