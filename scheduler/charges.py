"""What granted requests will take of their workers until the workers' own reports say so.

A charge begins with the grant, or with an adoption. While no report names the request it counts as work that is on its
way. It ends when the lease is closed and a later report omits the request: whatever a report still names is in the
report's own figures.
"""

from collections.abc import Set
from dataclasses import dataclass


@dataclass(slots=True)
class Charge:
    """One request on one worker. `cost` in token-equivalents; the rest in tokens, blocks, sequences."""

    request_id: str
    attempt: int
    worker_id: str
    prefill_tokens: float
    blocks: int
    sequences: int
    cost: float
    reported: bool = False
    closed: bool = False


@dataclass(frozen=True, slots=True)
class Pending:
    """Sum of what one worker's reports do not show yet."""

    prefill_tokens: float = 0.0
    blocks: int = 0
    sequences: int = 0


class Ledger:
    """All charges, by worker and request. Worker ids, not slots: an adopted request's worker may attach later."""

    def __init__(self) -> None:
        self._charges: dict[str, dict[str, Charge]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._charges.values()))

    def hold(self, charge: Charge) -> None:
        """Begin a charge; a newer attempt of the request replaces an older one on the same worker."""
        self._charges.setdefault(charge.worker_id, {})[charge.request_id] = charge

    def holds(self, worker_id: str, request_id: str, attempt: int) -> bool:
        """Whether an open lease has this attempt on this worker."""
        charge = self._charges.get(worker_id, {}).get(request_id)
        return charge is not None and charge.attempt == attempt and not charge.closed

    def close(self, worker_id: str, request_id: str, attempt: int) -> None:
        """The lease is closed or moved on; the charge ends with the worker's next report that omits the request."""
        charge = self._charges.get(worker_id, {}).get(request_id)
        if charge is not None and charge.attempt == attempt:
            charge.closed = True

    def drop(self, worker_id: str, request_id: str, attempt: int) -> None:
        """End a charge at once: the worker refused, or is not attached and cannot report."""
        charge = self._charges.get(worker_id, {}).get(request_id)
        if charge is not None and charge.attempt == attempt:
            self._remove(charge)

    def report(self, worker_id: str, running: Set[tuple[str, int]]) -> None:
        """What the worker says it runs: its own figures cover that from now on."""
        for charge in list(self._charges.get(worker_id, {}).values()):
            if (charge.request_id, charge.attempt) in running:
                charge.reported = True
            elif charge.closed:
                self._remove(charge)

    def worker_left(self, worker_id: str) -> None:
        """No report will end what is closed; open leases keep their charges, should the worker attach again."""
        for charge in list(self._charges.get(worker_id, {}).values()):
            if charge.closed:
                self._remove(charge)
            else:
                charge.reported = False

    def _remove(self, charge: Charge) -> None:
        of_worker = self._charges[charge.worker_id]
        del of_worker[charge.request_id]
        if not of_worker:
            del self._charges[charge.worker_id]

    def pending(self, worker_id: str) -> Pending:
        """What was granted and not yet reported."""
        prefill_tokens, blocks, sequences = 0.0, 0, 0
        for charge in self._charges.get(worker_id, {}).values():
            if not charge.reported:
                prefill_tokens += charge.prefill_tokens
                blocks += charge.blocks
                sequences += charge.sequences
        return Pending(prefill_tokens, blocks, sequences)

    def cost_of(self, worker_id: str) -> float:
        """Token-equivalents granted to the worker and not ended."""
        return sum(charge.cost for charge in self._charges.get(worker_id, {}).values())
