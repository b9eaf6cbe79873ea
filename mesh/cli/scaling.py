"""The order in which a running mesh grows and shrinks, so that no request notices.

Growing: new processes start beside the old ones and are ready before anybody is sent to them. A new scheduler is known
to the workers first, and to the gateways when all workers are attached there. If one does not come up, all that came
with it go again.

Shrinking, the highest index first: what leaves is taken out of discovery and, FOLLOW_S later, drained and stopped:
gateways end their answers; workers end theirs or park them, to go on elsewhere; schedulers send on what still waits.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from mesh.cli import targets
from mesh.cli.fleet import Fleet
from mesh.cli.plan import Layout, ProcessSpec
from mesh.cli.ports import PlanError
from mesh.cli.probes import unattached
from mesh.cli.process import ManagedProcess, StartFailed
from mesh.cli.roles import STOP_ORDER, changes
from mesh.discovery import LOOKUP_S
from mesh.tls import Tls

# Seconds in which everybody has looked discovery up again, with some to spare for a busy machine.
FOLLOW_S = 1.5 * LOOKUP_S
LOOK_S = 0.2

Tell = Callable[[str, str], None]  # of a process (empty = the whole), how far it is


class ScaleFailed(Exception):
    """The mesh could not grow. It is as it was, and the message says why."""


class Scaling:
    """Scales `fleet`, one request at a time."""

    def __init__(self, fleet: Fleet, layout: Layout, tls: Tls | None = None) -> None:
        self._fleet = fleet
        self._layout = layout
        self._unattached_to = partial(unattached, tls=tls)
        self._lock = asyncio.Lock()

    def publish(self, beside: Sequence[ProcessSpec] = ()) -> None:
        """Tell gateways of the joined schedulers; workers of those, of the joined caches, and of what is `beside`."""
        for role, name in (("scheduler", targets.WORKER_SCHEDULERS), ("cache", targets.WORKER_CACHES)):
            specs = [*self._fleet.joined(role), *(spec for spec in beside if spec.role == role)]
            targets.write(name, [spec.address for spec in specs])
        targets.write(targets.GATEWAY_SCHEDULERS, [spec.address for spec in self._fleet.joined("scheduler")])

    def follow(self) -> None:
        """Publish again what a process's new ports have changed. A scale under way will have done it when it ends."""
        if not self._lock.locked():
            self.publish()

    async def scale(self, wanted: Mapping[str, int], timeout_s: float, tell: Tell) -> list[str]:
        """Returns the names of processes that had to be killed. Raises ScaleFailed."""
        if self._lock.locked():
            tell("", "waiting for another scale to end")
        async with self._lock:
            found = changes(self._fleet.indices(), wanted)
            names = {f"{change.role}-{index}" for change in found for index in change.removed}
            leaving = [process for process in reversed(self._fleet.processes) if process.spec.name in names]
            self._check_staying(leaving)
            workers = wanted.get("worker", len(self._fleet.indices()["worker"]))
            try:
                specs = self._layout.more(reversed(found), workers)
            except PlanError as error:
                raise ScaleFailed(str(error)) from None
            await self._grow(specs, timeout_s, tell)
            return await self._shrink(leaving, tell)

    def _check_staying(self, leaving: Sequence[ManagedProcess]) -> None:
        """Those that are to take over must be there. Caches take over nothing."""
        roles = {process.spec.role for process in leaving} - {"cache"}
        staying = [p for p in self._fleet.processes if p.spec.role in roles and p not in leaving]
        if away := [f"{p.spec.name} is {p.phase}" for p in staying if p.phase != "ready"]:
            raise ScaleFailed(f"{', '.join(away)}, and would have to take over")

    async def _grow(self, specs: Sequence[ProcessSpec], timeout_s: float, tell: Tell) -> None:
        if not specs:
            return
        for spec in specs:
            tell(spec.name, "starting")
        new = self._fleet.add(specs)
        try:
            async with asyncio.timeout(timeout_s):
                await self._all_up(new, tell)
                specs = [process.spec for process in new]  # their ports may have changed
                self.publish(specs)
                await self._all_attached(specs)
        except StartFailed as failure:
            raise await self._undo(new, str(failure), tell) from None
        except TimeoutError:
            late = [p.spec.name for p in new if p.phase != "ready"] or await self._unattached(specs)
            raise await self._undo(new, f"not ready within {timeout_s:g} s: {', '.join(late)}", tell) from None
        self._fleet.join(new)
        self.publish()

    async def _all_up(self, new: Sequence[ManagedProcess], tell: Tell) -> None:
        waiting = list(new)
        while waiting:
            for process in [process for process in waiting if process.phase == "ready"]:
                waiting.remove(process)
                tell(process.spec.name, "ready")
            failed = next((process.failure for process in new if process.failure is not None), None)
            if failed is not None:
                raise failed
            if waiting:
                await self._fleet.change()

    async def _all_attached(self, specs: Sequence[ProcessSpec]) -> None:
        while await self._unattached(specs):  # noqa: ASYNC110 - other processes know, and tell only who asks
            await asyncio.sleep(LOOK_S)

    async def _unattached(self, specs: Sequence[ProcessSpec]) -> list[str]:
        """What is still missing between schedulers and workers, one of them new. Who is down now is excused."""
        ready = [process.spec for process in self._fleet.processes if process.phase == "ready"]
        workers = [spec for spec in ready if spec.role == "worker"]
        schedulers = [spec for spec in ready if spec.role == "scheduler"]
        missing = await self._unattached_to([spec for spec in schedulers if spec in specs], workers)
        return missing + await self._unattached_to(
            [spec for spec in schedulers if spec not in specs], [spec for spec in workers if spec in specs]
        )

    async def _undo(self, new: Sequence[ManagedProcess], why: str, tell: Tell) -> ScaleFailed:
        self.publish()
        for process in new:
            tell(process.spec.name, "stopping")
        await self._fleet.remove(new)
        self._layout.forget(process.spec for process in new)
        return ScaleFailed(why)

    async def _shrink(self, leaving: Sequence[ManagedProcess], tell: Tell) -> list[str]:
        if not leaving:
            return []
        self._fleet.part(leaving)
        # Workers stay attached to a scheduler that goes, for what still waits there.
        self.publish([process.spec for process in leaving if process.spec.role == "scheduler"])
        for process in leaving:
            tell(process.spec.name, "leaving")
        if any(process.spec.role != "worker" for process in leaving):
            await asyncio.sleep(FOLLOW_S)
        killed: list[str] = []
        for role in STOP_ORDER:
            group = [process for process in leaving if process.spec.role == role]
            if role == "scheduler":
                self.publish()
            for process in group:
                tell(process.spec.name, "draining")
            killed += await self._fleet.remove(group)
            self._layout.forget(process.spec for process in group)
            for process in group:
                tell(process.spec.name, "stopped")
        return killed
