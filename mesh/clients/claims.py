"""Which attempts no scheduler claims: the vote of all attached replicas, by the epoch rule of scheduler.proto. Pure.

A replica that has just come knows no leases yet, and one that left may have held some. So each change of the attached
set begins a new epoch in which every replica is asked anew; only a vote of all of them in one epoch parks an attempt.
"""

from collections.abc import Iterable

Attempt = tuple[str, int]  # request_id, attempt


class Claims:
    """The replicas' latest Unclaimed sets. `epoch` is Load.attach_epoch."""

    def __init__(self) -> None:
        self.epoch = 0
        self._sets: dict[str, frozenset[Attempt]] = {}  # attached replica -> its set of the current epoch

    @property
    def attached(self) -> frozenset[str]:
        """The replicas attached now, by whatever name the caller knows them."""
        return frozenset(self._sets)

    def attach(self, replica: str) -> None:
        """`replica` said Welcome. A new epoch begins, also when it only came back."""
        self._sets[replica] = frozenset()
        self._begin()

    def detach(self, replica: str) -> None:
        """`replica` is gone."""
        if self._sets.pop(replica, None) is not None:
            self._begin()

    def _begin(self) -> None:
        self.epoch += 1
        self._sets = dict.fromkeys(self._sets, frozenset())

    def hear(self, replica: str, epoch: int, attempts: Iterable[Attempt]) -> frozenset[Attempt]:
        """`replica`'s whole present set; returns what all attached replicas now leave unclaimed, to be parked."""
        if epoch != self.epoch or replica not in self._sets:
            return frozenset()
        self._sets[replica] = frozenset(attempts)
        return frozenset.intersection(*self._sets.values())
