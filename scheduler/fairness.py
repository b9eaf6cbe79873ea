"""Deficit round robin over tenants: each gets the same work, whatever the size or number of its requests.

Source: Shreedhar and Varghese, "Efficient Fair Queueing Using Deficit Round Robin" (1995). Two changes: a tenant's
requests go by least slack instead of first come, and `head` only looks, because a request that no worker has room for
is passed over and asked again later.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler.demand import Pins, Priority, Size

Blocked = Callable[["Waiting"], bool]


@dataclass(frozen=True, slots=True)
class Shape:
    """Which workers a request may use at all, and which of them only if no other one is well."""

    pins: Pins
    avoid: frozenset[str] = frozenset()
    shun: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """One request in a queue. Times are seconds of the clock handed in.

    `due_s` = arrival + wait target of its size, so the least slack is the smallest. `overdue_s` = arrival + patience of
    its priority: from then on it may overtake. `shape`, the two sizes and `choices` say what room it needs.
    `adrift` = an answer that a worker had and lost.
    """

    lease_id: int
    tenant: str
    priority: Priority
    size: Size
    cost: float
    arrived_s: float
    due_s: float
    overdue_s: float
    blocks: int
    span_tokens: int
    shape: Shape
    choices: int = 1
    adrift: bool = False

    @property
    def slack_key(self) -> tuple[float, int]:
        return self.due_s, self.lease_id

    @property
    def age_key(self) -> tuple[float, int]:
        return self.overdue_s, self.lease_id


@dataclass(slots=True)
class _Tenant:
    deficit: float = 0.0
    requests: list[Waiting] = field(default_factory=list)

    def head(self, blocked: Blocked) -> Waiting | None:
        return next((w for w in self.requests if not blocked(w)), None)


class TenantRing:
    """The requests of one priority. At most O(tenants) for each look or take."""

    def __init__(self, quantum_tokens: float) -> None:
        self._quantum = quantum_tokens
        # In ring order. The tenant being served is last, and goes on while its deficit lasts.
        self._tenants: dict[str, _Tenant] = {}

    def __len__(self) -> int:
        return sum(len(tenant.requests) for tenant in self._tenants.values())

    def add(self, waiting: Waiting) -> None:
        """A tenant that was not waiting joins the ring at its end, with nothing saved up."""
        tenant = self._tenants.setdefault(waiting.tenant, _Tenant())
        insort(tenant.requests, waiting, key=lambda w: w.slack_key)

    def ahead_of(self, waiting: Waiting) -> int:
        """Requests here with less slack."""
        return sum(
            bisect_left(tenant.requests, waiting.slack_key, key=lambda w: w.slack_key)
            for tenant in self._tenants.values()
        )

    def waiting_of(self, tenant: str) -> int:
        """Requests of one tenant."""
        return len(self._tenants[tenant].requests) if tenant in self._tenants else 0

    def head(self, blocked: Blocked) -> Waiting | None:
        """Whose turn it is, leaving out what is blocked. Changes nothing."""
        _, best = self._next(blocked)
        return best

    def _next(self, blocked: Blocked) -> tuple[int, Waiting | None]:
        """The winner and how many rounds of the ring pass before its deficit covers it."""
        rounds, best = 0, None
        for tenant in self._tenants.values():
            head = tenant.head(blocked)
            if head is None:
                continue
            needed = self._rounds(tenant, head)
            if best is None or needed < rounds:
                rounds, best = needed, head
            if not needed:
                break
        return rounds, best

    def _rounds(self, tenant: _Tenant, head: Waiting) -> int:
        return max(0, math.ceil((head.cost - tenant.deficit) / self._quantum))

    def take(self, waiting: Waiting) -> None:
        """Its turn came: the rounds that pass give every tenant its quantum, and its own pays."""
        rounds = self._rounds(self._tenants[waiting.tenant], waiting)
        self._pass_rounds(rounds, until=waiting.tenant)
        self.charge(waiting)

    def _pass_rounds(self, rounds: int, until: str) -> None:
        """Give `rounds` quanta to each tenant up to `until` in the ring, one less to those after it, and turn the ring.

        Nobody saves more than its next request costs: one that no worker has room for must not hoard.
        """
        if not rounds:
            return
        passed: list[str] = []
        quanta = rounds
        for name, tenant in self._tenants.items():
            most = max(tenant.deficit, tenant.requests[0].cost, self._quantum)
            given = tenant.deficit + quanta * self._quantum
            tenant.deficit = given if name == until else min(given, most)
            if quanta == rounds:
                passed.append(name)
            if name == until:
                quanta -= 1
        for name in passed:
            self._tenants[name] = self._tenants.pop(name)

    def charge(self, waiting: Waiting) -> None:
        """Remove a request that was granted, in or out of turn, and let its tenant pay: a deficit may fall below 0."""
        self._tenants[waiting.tenant].deficit -= waiting.cost
        self.remove(waiting)

    def remove(self, waiting: Waiting) -> None:
        """Remove without a charge. A tenant with nothing left leaves the ring, and its deficit lapses."""
        requests = self._tenants[waiting.tenant].requests
        del requests[bisect_left(requests, waiting.slack_key, key=lambda w: w.slack_key)]
        if not requests:
            del self._tenants[waiting.tenant]
