"""The rules of a tenant's token bucket, pure. bucket.lua is the same rules inside Redis; a test holds the two equal.

A bucket holds at most `capacity` token-equivalents and gains `refill_per_s`. Admission takes the expected price at once
(a check now and a charge later would let calls that arrive together all pass); settling gives back what was not used.
An answer that cost more than was reserved leaves a debt, which the refill pays first; the level stays within
[-capacity, capacity], so no mistake of one answer can lock a tenant out for longer than two capacities' refill.

Elapsed time never comes from the wall clock where another one can be had. A bucket remembers which process touched it
last and that process's monotonic clock: if the same one comes again, which is always so for one gateway, the elapsed
time is exact and a clock step has no effect. Between two processes it is the difference of the server's wall clock, at
least 0 and at most the time since the asking process itself last saw the bucket. A step can then not lend more than
that process has really lived through; a process that sees the bucket for the first time has no such bound.
"""

from dataclasses import dataclass

US = 1_000_000


@dataclass(frozen=True, slots=True)
class Rules:
    """A tenant's limits: token-equivalents, and token-equivalents per second."""

    capacity: float
    refill_per_s: float


@dataclass(frozen=True, slots=True)
class Clock:
    """When a process asks. `wall_us` is the bucket's server's wall clock, `mono_us` the process's own monotonic one.

    `seen_us` is `mono_us` of the process's last successful call for this bucket, or -1.
    """

    process: str
    mono_us: int
    wall_us: int
    seen_us: int = -1


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket as it was last written: its level, by whom, and when on both clocks."""

    level: float
    process: str
    mono_us: int
    wall_us: int


def elapsed_us(bucket: Bucket, clock: Clock) -> int:
    """Microseconds since `bucket` was written, as far as they can be trusted."""
    if bucket.process == clock.process:
        return max(0, clock.mono_us - bucket.mono_us)
    elapsed = max(0, clock.wall_us - bucket.wall_us)
    return elapsed if clock.seen_us < 0 else min(elapsed, max(0, clock.mono_us - clock.seen_us))


def refilled(bucket: Bucket | None, rules: Rules, clock: Clock) -> Bucket:
    """The bucket now. One that nobody has written is full."""
    if bucket is None:
        level = rules.capacity
    else:
        level = min(rules.capacity, bucket.level + elapsed_us(bucket, clock) * rules.refill_per_s / US)
    return Bucket(level, clock.process, clock.mono_us, clock.wall_us)


def take(bucket: Bucket | None, rules: Rules, clock: Clock, cost: float) -> tuple[Bucket, float]:
    """Charge `cost`, or say how many seconds it is until the bucket covers it: (bucket now, 0 if charged)."""
    now = refilled(bucket, rules, clock)
    if now.level < cost:
        return now, (cost - now.level) / rules.refill_per_s
    return Bucket(now.level - cost, now.process, now.mono_us, now.wall_us), 0.0


def give(bucket: Bucket | None, rules: Rules, clock: Clock, amount: float) -> Bucket:
    """Return `amount`; a negative one charges more. Never beyond the bounds."""
    now = refilled(bucket, rules, clock)
    level = max(-rules.capacity, min(rules.capacity, now.level + amount))
    return Bucket(level, now.process, now.mono_us, now.wall_us)
