"""Whether two greedy runs agree although their arithmetic differs: vLLM's log-probability test.

Rounding makes a near tie fall either way, and after that the two answer different questions. So the runs are compared
up to their first difference, and there each side's token must be among the other's likeliest.
Source: vLLM's tests/models/utils.py, check_logprobs_close.
"""

from collections.abc import Sequence
from dataclasses import dataclass

LIKELIEST = 5


@dataclass(frozen=True, slots=True)
class GreedyRun:
    """Output ids, and at each position the ids of the likeliest tokens there, `LIKELIEST` of them."""

    ids: Sequence[int]
    likeliest: Sequence[Sequence[int]]


def disagreement(ours: GreedyRun, theirs: GreedyRun) -> str:
    """What is wrong at the first difference; "" if nothing is."""
    pairs = zip(ours.ids, theirs.ids, ours.likeliest, theirs.likeliest, strict=False)
    for position, (mine, other, my_top, other_top) in enumerate(pairs):
        if mine == other:
            continue
        if mine not in other_top:
            return f"position {position}: our token {mine} is none of theirs, {list(other_top)}"
        if other not in my_top:
            return f"position {position}: their token {other} is none of ours, {list(my_top)}"
        return ""
    return ""
