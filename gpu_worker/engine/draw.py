"""The random choice of one token, on the logits [V] of one row, in plain numpy on one thread.

temperature, then top_k, top_p and min_p, each on what the one before left; then the token at which the cumulative
probability, in vocabulary order, passes `number` times the whole. Equals at an edge come along, and the likeliest token
always stays. Nothing sorts or sums up the whole vocabulary in order where a part of it decides:

- top_k looks at the largest of each of GROUPS groups first: as many as k of these are at least as large as the k-th of
  them, so nothing below that is among the k largest of all.
- The number falls into one block of the vocabulary, found by the blocks' sums; only that block is summed up in order.
- top_p sorts the tokens that have at least LIKELY of the likeliest one's probability, if these reach the share;
  else those that are not so unlikely that all like them together are less than what is left out.
"""

import math

import numpy as np

from mesh.sampling import Sampling

COLDEST = 1e-6  # temperatures below count as this one: still greedy in effect, and logits / T stays a number
BLOCK = 256
FEW = 2048  # tokens that are summed up in order at once
LIKELY = 2.0**-10
GROUPS = 256
CLOSE = 1e-3


def draw(logits: np.ndarray, most: np.float32, sampling: Sampling, number: float) -> int:
    """A token id. `most` is the largest of logits and finite; `number` is in [0, 1)."""
    ids: np.ndarray | None = None  # of the tokens that `p` is about, ascending; None = all
    p = logits - most
    p /= np.float32(max(sampling.temperature, COLDEST))
    if 0 < sampling.top_k < len(p):
        ids = largest(p, sampling.top_k)
        p = p[ids]
    if sampling.min_p > 0 and sampling.top_p == 1:  # spares the others the exponential; what is close is decided below
        p, ids = _keep(p, ids, np.float32(math.log(sampling.min_p) - CLOSE))
    np.exp(p, out=p)
    if sampling.top_p < 1:
        p, ids = _keep(p, ids, _nucleus_floor(p, sampling.top_p))
    if sampling.min_p > 0:
        p, ids = _keep(p, ids, np.float32(sampling.min_p))  # the likeliest has 1, exactly
    at = pick(p, number)
    return at if ids is None else int(ids[at])


def _keep(p: np.ndarray, ids: np.ndarray | None, floor: np.float32) -> tuple[np.ndarray, np.ndarray]:
    kept = np.flatnonzero(p >= floor)
    return p[kept], kept if ids is None else ids[kept]


def _nucleus_floor(p: np.ndarray, top_p: float) -> np.float32:
    """The least of the fewest likeliest whose sum reaches top_p of the whole."""
    total = float(p.sum())
    goal = top_p * total
    for least in (LIKELY, (1 - top_p) * total / len(p)):
        likeliest = p[p >= least]
        likeliest.sort()
        reached = likeliest[::-1].cumsum(dtype=np.float64)
        if reached[-1] >= goal:
            floor: np.float32 = likeliest[len(likeliest) - 1 - int(reached.searchsorted(goal))]
            return floor
    return np.float32(0)  # rounding kept the sum under the goal: everything is in


def largest(x: np.ndarray, k: int) -> np.ndarray:
    """Where the k largest of x [N] are, ascending; with all that equal the least of them. 0 < k <= N."""
    near = np.arange(len(x))
    whole = len(x) // GROUPS * GROUPS
    if k <= GROUPS < whole:
        tops = x[:whole].reshape(-1, GROUPS).max(axis=0)  # a group is a column: its maximum takes no reduction in a row
        near = np.flatnonzero(x >= np.partition(tops, GROUPS - k)[GROUPS - k])
    values = x[near]
    kept: np.ndarray = near[values >= np.partition(values, len(values) - k)[len(values) - k]]
    return kept


def pick(p: np.ndarray, number: float) -> int:
    """Where the cumulative sum of p [N], not normalized, passes `number` of the whole; never where p is 0."""
    if len(p) <= FEW:
        inside = p.cumsum(dtype=np.float64)
        return int(inside.searchsorted(min(number * inside[-1], np.nextafter(inside[-1], 0)), side="right"))
    whole = len(p) // BLOCK * BLOCK
    sums = p[:whole].reshape(-1, BLOCK).sum(axis=1).astype(np.float64)
    before = np.concatenate([sums, [p[whole:].sum(dtype=np.float64)]]).cumsum()
    # Below the total, whatever the rounding: so the search ends at the last block with a share, never past it.
    target = min(number * before[-1], np.nextafter(before[-1], 0))
    block = int(before.searchsorted(target, side="right"))
    rest = target - before[block - 1] if block else target
    inside = p[block * BLOCK : (block + 1) * BLOCK]
    at = int(inside.cumsum(dtype=np.float64).searchsorted(rest, side="right"))
    # Inside, the sum in order may round to less than the block's: the last token with a share then.
    return block * BLOCK + (at if at < len(inside) else int(np.flatnonzero(inside)[-1]))
