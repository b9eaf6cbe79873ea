"""Which worker: the one that would give the first token soonest.

    expected ms = (queued prefill + charges not yet reported + uncached prefill) / prefill rate
                  + fetch time of what lies at slower tiers + one step

after credit for the leading blocks that the worker holds. Workers within `tie_ms` of the best are equal: the session's
own worker goes first among them, then the least loaded. Only workers with room are weighed: prefill ahead of it under
`room_prefill_ms`, and uncommitted blocks (free + cached, less what running requests may still grow into) that cover
prompt and expected output. A worker outside the fault domains in which the request failed is preferred to one inside.
One that broke under it is tried again only where no other is well, `again_after_s` after the last such failure there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mesh.blocks import BLOCK_TOKENS
from mesh.errors import InvalidRequest
from scheduler.demand import Demand, Pins
from scheduler.prefixes import Tier
from scheduler.registry import Mask, Registry

Floats = NDArray[np.float64]
LEAST_TIME, LEAST_LOADED, AFFINITY = "least expected time", "least loaded of equals", "session affinity"
TOP = 3


@dataclass(frozen=True, slots=True)
class PlacementPolicy:
    """`default_prefill_tokens_per_s` stands in until a worker has measured its rate."""

    room_prefill_ms: float = 300.0
    beside_prefills: int = 2
    look_ahead_sequences: int = 4
    tie_ms: float = 10.0
    stale_s: float = 3.0
    again_after_s: float = 1.0
    default_prefill_tokens_per_s: float = 1_000.0


@dataclass(frozen=True, slots=True)
class Ask:
    """What placement has to know of one request. `home` is the worker its session used last; empty = none."""

    pins: Pins
    prefill_tokens: int
    blocks: int
    span_tokens: int
    choices: int = 1
    keys: Sequence[bytes] = ()
    avoid: frozenset[str] = frozenset()
    shun: frozenset[str] = frozenset()
    avoid_domains: frozenset[str] = frozenset()
    home: str = ""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One worker as it was weighed. `cached_tokens` by tier, nearest first."""

    worker_id: str
    expected_ms: float
    cached_tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Placement:
    """The choice, and why. `uncached_tokens` is the prefill it will cost there."""

    slot: int
    uncached_tokens: float
    candidates: tuple[Candidate, ...]
    reason: str


def serving(ask: Ask, workers: Registry) -> Mask:
    """Attached workers that could ever take it: pins match, not avoided, not draining. [slot]"""
    mask: Mask = workers.matching(ask.pins) & ~workers.rows["draining"]
    mask[workers.slots_of(ask.avoid)] = False
    return mask


def usable(mask: Mask, workers: Registry, policy: PlacementPolicy, now: float) -> Mask:
    """Of `mask`, those that are well: healthy, heard of lately, breaker not open. [slot]"""
    rows = workers.rows
    fresh = now - rows["reported_s"] <= policy.stale_s
    well: Mask = mask & rows["reported"] & rows["healthy"] & fresh & ~rows["tripped"]
    return well


def _able(ask: Ask, workers: Registry, policy: PlacementPolicy, now: float) -> Mask:
    """Workers to be weighed for it once they have room: well, large enough, and not shunned if others are. [slot]"""
    able = usable(serving(ask, workers), workers, policy, now) & _holds(ask, workers.rows)
    if not ask.shun:
        return able
    others = able.copy()
    others[workers.slots_of(ask.shun)] = False
    if others.any():
        return others
    again: Mask = able & (now - workers.rows["failed_s"] >= policy.again_after_s)
    return again


def place(ask: Ask, workers: Registry, policy: PlacementPolicy, now: float, held: Mask) -> Placement | None:
    """The best worker with room, or None. `held` slots are kept free for somebody else."""
    room = _able(ask, workers, policy, now) & _has_room(ask, workers, policy) & ~held
    outside = room & ~np.isin(workers.rows["domain"], workers.domains_of(ask.avoid_domains))
    room = outside if outside.any() else room
    slots = np.flatnonzero(room)
    if not len(slots):
        return None
    cached = workers.prefixes.leading(ask.keys, len(workers.rows))[:, slots] * BLOCK_TOKENS
    uncached, expected = _expected_ms(ask, workers.rows[slots], cached, policy)
    chosen, reason = _choose(ask, workers, slots, expected, policy)
    best = [int(i) for i in np.argsort(expected, kind="stable")[:TOP]]
    if chosen not in best:
        best[-1] = chosen
    candidates = tuple(
        Candidate(workers.at(int(slots[i])).hello.worker_id, float(expected[i]), tuple(map(int, cached[:, i])))
        for i in best
    )
    return Placement(int(slots[chosen]), float(uncached[chosen]), candidates, reason)


def _rate(rows: NDArray[np.void], policy: PlacementPolicy) -> Floats:
    """Prefill tokens per second."""
    measured: Floats = rows["prefill_tokens_per_s"]
    return np.where(measured > 0, measured, policy.default_prefill_tokens_per_s)


def _queued_ms(rows: NDArray[np.void], policy: PlacementPolicy) -> Floats:
    """Prefill that is there or on its way."""
    tokens: Floats = rows["queued_prefill_tokens"] + rows["pending_prefill_tokens"]
    return tokens / _rate(rows, policy) * 1_000


def _ahead_ms(ask: Ask, rows: NDArray[np.void], policy: PlacementPolicy) -> Floats:
    """Prefill that would come before the request's own.

    A worker gives half of a step's prompt tokens to its oldest prompt and the rest to the shortest. So where few
    prompts are computed, a short one waits beside a long one for its own length at most, not behind it.
    """
    queued: Floats = _queued_ms(rows, policy)
    own = ask.prefill_tokens / _rate(rows, policy) * 1_000
    return np.where(_few_prefills(rows, policy), np.minimum(queued, own), queued)


def _few_prefills(rows: NDArray[np.void], policy: PlacementPolicy) -> Mask:
    """Workers that compute fewer prompts than may be beside each other, or are about to; False where they don't say."""
    silent = (rows["prefilling_sequences"] == 0) & (rows["queued_prefill_tokens"] > 0)
    mask: Mask = ~silent & (rows["prefilling_sequences"] + rows["pending_sequences"] < policy.beside_prefills)
    return mask


def _takes_more(rows: NDArray[np.void], policy: PlacementPolicy) -> Mask:
    """Workers that may have room, as far as that does not depend on the request."""
    sequences = rows["sequences"] + rows["pending_sequences"]
    mask: Mask = (
        ~rows["refuses"]
        & ~rows["full"]
        & ((_queued_ms(rows, policy) < policy.room_prefill_ms) | _few_prefills(rows, policy))
        & (sequences < rows["max_sequences"] + policy.look_ahead_sequences)
    )
    return mask


def _holds(ask: Ask, rows: NDArray[np.void]) -> Mask:
    """Workers that are large enough, were they idle."""
    mask: Mask = (rows["capacity_tokens"] >= ask.span_tokens) & (rows["max_sequences"] >= ask.choices)
    return mask


def _has_room(ask: Ask, workers: Registry, policy: PlacementPolicy) -> Mask:
    rows = workers.rows
    mask: Mask = (
        _takes_more(rows, policy)
        & (_ahead_ms(ask, rows, policy) < policy.room_prefill_ms)
        # One that needs more than the whole pool (many choices) runs when it has the pool to itself.
        & (uncommitted_blocks(rows) >= np.minimum(ask.blocks, rows["total_blocks"]))
    )
    return mask


def spare_blocks(line: tuple[str, str], workers: Registry, policy: PlacementPolicy, now: float) -> float:
    """Most blocks that a request of this line could be given now. 0 = no worker takes any, inf = a pool is idle."""
    mask = usable(workers.of_line(line), workers, policy, now) & _takes_more(workers.rows, policy)
    rows = workers.rows[mask & ~workers.rows["draining"]]
    spare = uncommitted_blocks(rows)
    return float("inf") if (spare == rows["total_blocks"]).any() else float(spare.max(initial=0))


def uncommitted_blocks(rows: NDArray[np.void]) -> NDArray[np.int64]:
    """Blocks that neither running nor granted requests use or may grow into."""
    blocks: NDArray[np.int64] = rows["total_blocks"] - rows["committed_blocks"] - rows["pending_blocks"]
    return blocks


def _expected_ms(ask: Ask, rows: NDArray[np.void], cached: Floats, policy: PlacementPolicy) -> tuple[Floats, Floats]:
    """Uncached prefill tokens and milliseconds to the first token, for each row. cached: [tier, row], tokens.

    A slower tier is only read where that is faster than computing; its rate unknown, it counts as not there.
    """
    rate = _rate(rows, policy)
    uncached = ask.prefill_tokens - cached[Tier.DEVICE]
    fetch_ms = np.zeros(len(rows))
    for tier in (Tier.HOST, Tier.DISK):
        tier_rate = rows["tier_tokens_per_s"][:, tier]
        fetched = np.where(tier_rate > rate, cached[tier], 0.0)
        fetch_ms += fetched / np.maximum(tier_rate, 1.0) * 1_000
        uncached = uncached - fetched
    # The last prompt token is always computed: its logits are the answer's first.
    uncached = np.maximum(uncached, 1.0)
    expected = _queued_ms(rows, policy) + uncached / rate * 1_000 + fetch_ms + rows["median_step_ms"]
    # What cannot be compared comes last: a NaN would win every argmin and equal nobody, itself included.
    return uncached, np.where(np.isnan(expected), np.inf, expected)


def _choose(
    ask: Ask, workers: Registry, slots: NDArray[np.intp], expected: Floats, policy: PlacementPolicy
) -> tuple[int, str]:
    """Index into `slots` and the reason."""
    best = int(np.argmin(expected))
    equals = np.flatnonzero(expected <= expected[best] + policy.tie_ms)
    home = workers.get(ask.home)
    at_home = equals[slots[equals] == home.slot] if home is not None else equals[:0]
    if len(at_home):
        return int(at_home[0]), AFFINITY
    rows = workers.rows[slots[equals]]
    load = (rows["sequences"] + rows["pending_sequences"]) / np.maximum(rows["max_sequences"], 1)
    calmest = int(equals[np.argmin(load)])
    return (best, LEAST_TIME) if calmest == best else (calmest, LEAST_LOADED)


def roomiest(ask: Ask, workers: Registry, policy: PlacementPolicy, now: float) -> int | None:
    """The worker on which a request that fits nowhere now is likeliest to fit next; None if none could ever."""
    slots = np.flatnonzero(_able(ask, workers, policy, now))
    if not len(slots):
        return None
    return int(slots[np.argmax(uncommitted_blocks(workers.rows[slots]))])


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that attached workers of a kind hold: choices, and tokens of one sequence among so many choices."""

    tokens: int
    choices: int


def limits_of(pins: Pins, choices: int, workers: Registry) -> Limits | None:
    """Limits for a request of that many choices; None if there is no such worker."""
    rows = workers.rows[workers.matching(pins)]
    if not len(rows):
        return None
    able = rows[rows["max_sequences"] >= choices]
    return Limits(int(able["capacity_tokens"].max(initial=0)), int(rows["max_sequences"].max()))


def never_fits(demand: Demand, most: Limits | None) -> InvalidRequest | None:
    """What to change in a request that exceeds the limits; None if it can be held, or nothing is known."""
    if most is None:
        return None
    model = demand.pins.model
    if demand.choices > most.choices:
        text = f"{demand.choices} choices were asked for; {model} runs at most {most.choices}"
        return InvalidRequest(text, field="choices")
    if demand.prompt_tokens >= most.tokens:
        text = f"the prompt has {demand.prompt_tokens} tokens; {model} takes at most {most.tokens - 1}"
        return InvalidRequest(text, field="prompt")
    if demand.span_tokens > most.tokens:
        text = f"prompt and max_tokens come to {demand.span_tokens} tokens; {model} holds at most {most.tokens}"
        return InvalidRequest(text, field="max_tokens")
    return None
