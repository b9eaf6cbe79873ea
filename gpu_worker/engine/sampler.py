"""From logits to tokens. Each row is one choice's next token and depends on nothing but its own logits and history.

Order: penalties and bias, then minimum length and grammar (rows.py), then temperature, then top_k, top_p and min_p,
then the choice (draw.py). A random choice uses one number in [0, 1): a pure function of (seed, choice, position), so
equal logits give the same answer whatever shares the batch, after a preemption and on another worker.

Rows are computed one after the other in numpy, on one thread: a row of 49,152 stays in the cache from its first pass to
its last, and no result depends on how a library would split a batch.
"""

import logging
from collections.abc import Sequence

import numpy as np
import torch

from gpu_worker.engine.api import Logprob
from gpu_worker.engine.counted_random import uniform
from gpu_worker.engine.draw import draw, largest
from gpu_worker.engine.grammar import GrammarFailed
from gpu_worker.engine.rows import Row
from gpu_worker.engine.runner import Sampled
from mesh.sampling import Sampling

# Per row of logits: the likeliest token's id, and whether its logit is a number (so no other is NaN or +inf).
Greedy = tuple[Sequence[int], Sequence[bool]]

log = logging.getLogger(__name__)


def sample(logits: torch.Tensor, rows: Sequence[Row], greedy: Greedy | None = None) -> list[Sampled | None]:
    """Choose one token per row of logits [R, V] (fp32; may be changed in place). None where a row holds no usable
    number, or its grammar failed. `greedy` is for rows that need no more than the likeliest token.
    """
    if logits.device.type != "cpu":
        greedy = greedy or _greedy_of(logits)
        logits = logits if all(row.plain for row in rows) else logits.cpu()
    table = logits.numpy() if logits.device.type == "cpu" else None
    sampled: list[Sampled | None] = []
    with np.errstate(all="ignore"):  # what leaves the range of fp32 shows in the end
        for index, row in enumerate(rows):
            if row.plain and greedy is not None:
                sampled.append(Sampled(int(greedy[0][index])) if greedy[1][index] else None)
            elif table is not None:
                sampled.append(_choose(table[index], row))
    return sampled


def _greedy_of(logits: torch.Tensor) -> Greedy:
    """On the device, so that only the answer leaves it."""
    values, ids = logits.max(dim=-1)
    return ids.tolist(), values.isfinite().tolist()


def _choose(logits: np.ndarray, row: Row) -> Sampled | None:
    """One row's token; logits [V] are changed in place."""
    likeliest = int(logits.argmax())
    if not np.isfinite(logits[likeliest]):  # NaN counts as the largest
        return None
    if row.plain:
        return Sampled(likeliest)
    asked = row.sampling.top_logprobs is not None
    raw = logits.copy() if asked else logits
    try:
        row.adjust(logits)
    except GrammarFailed:
        log.exception("the grammar of a choice failed")
        return None
    token = int(logits.argmax())
    if not np.isfinite(logits[token]):  # penalties may leave the range of fp32
        return None
    if row.sampling.temperature > 0:
        token = draw(logits, logits[token], row.sampling, uniform(row.sampling.seed or 0, row.choice, row.position))
    return Sampled(token, _logprob(raw, token, row.sampling) if asked else None)


def _logprob(logits: np.ndarray, token: int, sampling: Sampling) -> Logprob:
    """ln p at temperature 1 of the token and the likeliest ones; of equals the lower id comes first."""
    most = logits.max()
    norm = most + np.log(np.exp(logits - most).sum())
    count = min(sampling.top_logprobs or 0, len(logits))
    ids = largest(logits, count) if count else np.empty(0, dtype=np.int64)
    ids = ids[np.argsort(-logits[ids], kind="stable")][:count]
    values = (logits[ids] - norm).tolist()
    top = list(zip(ids.tolist(), values, strict=True))
    return Logprob(token_id=token, logprob=float(logits[token] - norm), top=top)
