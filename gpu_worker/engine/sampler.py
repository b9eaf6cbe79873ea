"""From logits to tokens. Each row is one choice's next token and depends on nothing but its own logits and history.

Order: penalties and bias, then minimum length, then temperature, then top_k, top_p and min_p (each on what the one
before left), then the choice. A random choice uses one number in [0, 1): a pure function of (seed, choice, position),
so equal logits give the same answer whatever shares the batch, after a preemption and on another worker.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from gpu_worker.engine.api import Logprob
from gpu_worker.engine.counted_random import uniform
from gpu_worker.engine.runner import Sampled
from mesh.sampling import Sampling

COLDEST = 1e-6  # temperatures below count as this one: still greedy in effect, and logits / T stays a number
NUCLEUS_GUESS = 512  # top_p first looks at so many likeliest tokens and sorts the whole vocabulary only if it must


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the logits: whose next token, and what it depends on."""

    sampling: Sampling
    choice: int
    position: int  # output position of the token to choose
    counts: Mapping[int, int]  # output token -> times, for presence and frequency penalties
    seen: Sequence[int]  # prompt and output, for the repetition penalty
    ending_ids: Sequence[int]  # tokens that would end the choice, held back before min_tokens


def sample(logits: torch.Tensor, rows: Sequence[Row]) -> list[Sampled | None]:
    """Choose one token per row of logits [R, V] (fp32; changed in place). None where a row holds no usable number."""
    finite = torch.isfinite(logits.amax(dim=-1))  # NaN and +inf show in the maximum
    raw = {i: logits[i].log_softmax(dim=-1) for i, row in enumerate(rows) if row.sampling.top_logprobs is not None}
    for i, row in enumerate(rows):
        _adjust(logits[i], row)
    # Once more: penalties may leave the range of fp32, and before them is not enough, for a mask may hide a +inf.
    usable = (finite & torch.isfinite(logits.amax(dim=-1))).tolist()
    tokens = logits.argmax(dim=-1).tolist()
    drawn = [i for i, row in enumerate(rows) if row.sampling.temperature > 0 and usable[i]]
    if drawn:
        chosen = _draw(logits if len(drawn) == len(rows) else logits[drawn], [rows[i] for i in drawn])
        for i, token in zip(drawn, chosen, strict=True):
            tokens[i] = token
    return [
        Sampled(token, _logprob(raw[i], token, rows[i].sampling) if i in raw else None) if usable[i] else None
        for i, token in enumerate(tokens)
    ]


def _adjust(logits: torch.Tensor, row: Row) -> None:
    """Penalties, bias and minimum length of one row [V], in place."""
    sampling = row.sampling
    if sampling.repetition_penalty != 1:
        ids = _ids(set(row.seen), logits)
        values = logits[ids]
        penalty = sampling.repetition_penalty
        logits[ids] = torch.where(values > 0, values / penalty, values * penalty)
    if row.counts and (sampling.presence_penalty or sampling.frequency_penalty):
        times = torch.tensor(list(row.counts.values()), dtype=logits.dtype, device=logits.device)
        logits[_ids(row.counts, logits)] -= sampling.presence_penalty + sampling.frequency_penalty * times
    if sampling.logit_bias:
        bias = list(sampling.logit_bias.values())
        logits[_ids(sampling.logit_bias, logits)] += torch.tensor(bias, dtype=logits.dtype, device=logits.device)
    if row.position < sampling.min_tokens and row.ending_ids:
        logits[_ids(row.ending_ids, logits)] = -math.inf


def _ids(tokens: "Sequence[int] | set[int] | Mapping[int, float]", like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(list(tokens), dtype=torch.long, device=like.device)


def _draw(logits: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    """Inverse-CDF choice in vocabulary order; logits [R, V]."""

    def column(values: list[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=logits.device)[:, None]

    temperature = column([max(row.sampling.temperature, COLDEST) for row in rows])
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    probabilities = torch.softmax(scaled, dim=-1)
    for i, row in enumerate(rows):
        _truncate(probabilities[i], row.sampling)
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    numbers = [uniform(row.sampling.seed or 0, row.choice, row.position) for row in rows]
    # Below the total, whatever the rounding: so the search ends at the last token with a share, never past it.
    target = torch.minimum(column(numbers, torch.float64) * total, torch.nextafter(total, torch.zeros_like(total)))
    chosen: list[int] = torch.searchsorted(cumulative, target, right=True)[:, 0].tolist()
    return chosen


def _truncate(p: torch.Tensor, sampling: Sampling) -> None:
    """Zero what top_k, top_p and min_p leave out of one row [V], in place. The likeliest token always stays."""
    if 0 < sampling.top_k < len(p):
        p[p < p.topk(sampling.top_k).values[-1]] = 0
    if sampling.top_p < 1:
        p[p < _nucleus_floor(p, sampling.top_p)] = 0
    if sampling.min_p > 0:
        p[p < sampling.min_p * p.max()] = 0


def _nucleus_floor(p: torch.Tensor, top_p: float) -> torch.Tensor:
    """The least probability in the smallest set of likeliest tokens whose share reaches top_p; ties come along."""
    goal = top_p * p.sum()
    for size in (min(NUCLEUS_GUESS, len(p)), len(p)):
        likeliest = p.topk(size).values
        reached = likeliest.cumsum(dim=0) >= goal
        if bool(reached[-1]):
            return likeliest[reached.int().argmax()]
    return likeliest[-1]  # rounding kept the sum under the goal: everything is in


def _logprob(log_probabilities: torch.Tensor, token: int, sampling: Sampling) -> Logprob:
    count = min(sampling.top_logprobs or 0, len(log_probabilities))
    values, ids = log_probabilities.topk(count)
    top = list(zip(ids.tolist(), values.tolist(), strict=True))
    return Logprob(token_id=token, logprob=float(log_probabilities[token]), top=top)
