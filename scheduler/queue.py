"""The order of one line: who of those that wait for one (model, pool) is granted next.

Order: priority first; inside a priority deficit round robin picks the tenant (fairness.py); of that tenant's requests
the one with the least slack to its size's wait target.

Age: a request that has waited longer than its priority's patience is overdue. The most overdue one (earliest arrival +
patience) goes before everybody else, whatever its priority, tenant and size; each such turn is paid for, so that turns
of this kind take at most `overtake_share` of the work granted while others wait. So age wins in the end, and
a mountain of old batch work still leaves high priority its three quarters.

    Bound. Let C be the token-equivalents per second granted from the line while anything waits, A the cost of all
    requests with an earlier arrival + patience (what was there before, plus what of shorter patience arrives within the
    difference), M the dearest request's cost. Then at any load, however much high priority arrives,

        wait <= patience + (A + 2 M) / (overtake_share x C)

    Why: from the moment it is overdue every overtaking turn goes to it or to one of A. Between two such turns at most
    (1 / share - 1) times the work of the first passes in the ordinary order, and one request more in all.

A requeued request keeps its arrival, hence its age. An answer that its worker lost has had its turn, and somebody reads
it: it goes before all others of its priority, oldest first. Such are at most what ran when a worker broke, so they add
their own work once to the wait of the others. Whoever is most overdue and fits nowhere yet gets a worker held
for it (lines.py), so that smaller requests cannot keep the room it needs from ever coming together.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

from scheduler.demand import Demand, Priority, size_of
from scheduler.fairness import Blocked, Shape, TenantRing, Waiting

# How fast the mean time between grants follows: the last ten or so count.
PACE = 0.1


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """Tuples go by Priority (patience) and by Size (targets); size_bounds are the top of S and of M."""

    wait_target_s: tuple[float, float, float] = (0.2, 0.5, 3.0)
    patience_s: tuple[float, float, float] = (5.0, 10.0, 60.0)
    size_bounds: tuple[float, float] = (2_500.0, 20_000.0)
    overtake_share: float = 0.25
    quantum_tokens: float = 2_000.0
    limit: int = 1_000
    batch_limit: int = 500
    tenant_limit: int = 500

    def waiting(
        self,
        lease_id: int,
        demand: Demand,
        arrived_s: float,
        emitted_tokens: int = 0,
        shape: Shape | None = None,
        *,
        adrift: bool = False,
    ) -> Waiting:
        """A queue entry of the request, its class predicted from what is left to do. No `shape` = any such worker."""
        tokens = demand.cost(emitted_tokens)
        size = size_of(tokens, self.size_bounds)
        return Waiting(
            lease_id=lease_id,
            tenant=demand.tenant,
            priority=demand.priority,
            size=size,
            cost=tokens,
            arrived_s=arrived_s,
            due_s=arrived_s + self.wait_target_s[size],
            overdue_s=arrived_s + self.patience_s[demand.priority],
            blocks=demand.blocks(emitted_tokens),
            span_tokens=demand.span_tokens,
            shape=shape or Shape(demand.pins),
            choices=demand.choices,
            adrift=adrift,
        )


class Line:
    """The queue of one (model, pool)."""

    def __init__(self, policy: QueuePolicy) -> None:
        self._policy = policy
        self._rings = {priority: TenantRing(policy.quantum_tokens) for priority in Priority}
        self._by_age: list[Waiting] = []
        self._adrift: list[Waiting] = []
        # Work that the ordinary order must still be given before the next overtaking turn.
        self._debt = 0.0
        self._interval_s = 0.0
        self._last_take_s = 0.0

    def __len__(self) -> int:
        return len(self._by_age)

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._by_age)

    def full_for(self, tenant: str, priority: Priority) -> bool:
        """Whether a new request has to be turned away. Requeued ones are always taken back."""
        policy = self._policy
        batch = len(self._rings[Priority.BATCH]) if priority is Priority.BATCH else 0
        of_tenant = sum(ring.waiting_of(tenant) for ring in self._rings.values())
        return len(self) >= policy.limit or batch >= policy.batch_limit or of_tenant >= policy.tenant_limit

    def add(self, waiting: Waiting) -> int:
        """Returns how many were ahead: those of a higher priority, and those of its own with less slack."""
        ahead = sum(len(self._rings[p]) for p in Priority if p < waiting.priority)
        ahead += self._rings[waiting.priority].ahead_of(waiting)
        self._rings[waiting.priority].add(waiting)
        insort(self._by_age, waiting, key=lambda w: w.age_key)
        if waiting.adrift:
            insort(self._adrift, waiting, key=_adrift_key)
        return ahead

    def remove(self, waiting: Waiting) -> None:
        """It left without a grant."""
        self._rings[waiting.priority].remove(waiting)
        self._forget(waiting)

    def pick(self, now: float, blocked: Blocked) -> Waiting | None:
        """Who is next, leaving out what is blocked. Changes nothing."""
        return self._overtaking(now, blocked) or self._in_turn(blocked)

    def _in_turn(self, blocked: Blocked) -> Waiting | None:
        adrift = next((waiting for waiting in self._adrift if not blocked(waiting)), None)
        for priority, ring in self._rings.items():
            if adrift is not None and adrift.priority is priority:
                return adrift
            if (head := ring.head(blocked)) is not None:
                return head
        return None

    def _overtaking(self, now: float, blocked: Blocked) -> Waiting | None:
        if self._debt > 0:
            return None
        for waiting in self._by_age:
            if waiting.overdue_s > now:
                return None
            if not blocked(waiting):
                return waiting
        return None

    def take(self, waiting: Waiting, now: float) -> None:
        """It was granted; it must be the one that `pick` gave."""
        if waiting.overdue_s <= now and self._debt <= 0:
            self._debt += waiting.cost * (1 / self._policy.overtake_share - 1)
            self._rings[waiting.priority].charge(waiting)
        else:
            self._debt = max(self._debt - waiting.cost, -waiting.cost)
            ring = self._rings[waiting.priority]
            (ring.charge if waiting.adrift else ring.take)(waiting)
        interval_s = now - min(now, max(self._last_take_s, waiting.arrived_s))
        self._interval_s += PACE * (interval_s - self._interval_s)
        self._last_take_s = now
        self._forget(waiting)

    def turnover_s(self) -> float:
        """Seconds until all that waits now will have been granted, at the pace of late."""
        return len(self) * self._interval_s

    def _forget(self, waiting: Waiting) -> None:
        del self._by_age[bisect_left(self._by_age, waiting.age_key, key=lambda w: w.age_key)]
        if waiting.adrift:
            del self._adrift[bisect_left(self._adrift, _adrift_key(waiting), key=_adrift_key)]


def _adrift_key(waiting: Waiting) -> tuple[Priority, float, int]:
    return waiting.priority, waiting.arrived_s, waiting.lease_id
