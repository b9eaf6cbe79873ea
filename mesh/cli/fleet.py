"""The processes of a local mesh as a set that grows and shrinks while it runs.

A process has joined when its peers and clients may know of it, and has parted before it is stopped. One that has not
joined may fail to come up and nothing else suffers; so may a cache once the mesh stands, which works without.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Iterable
from functools import partial

from mesh.cli.grace import grace_s
from mesh.cli.plan import ProcessSpec
from mesh.cli.probes import probe
from mesh.cli.process import ManagedProcess, Move, StartFailed
from mesh.cli.roles import STOP_ORDER
from mesh.tls import Tls

logger = logging.getLogger("shoal.supervisor")


class Fleet:
    """Add processes at any time; they run once `run_in` was called. `changed` hears of every change of any of them."""

    def __init__(
        self, changed: Callable[[], None], *, restart: bool, tls: Tls | None = None, move: Move | None = None
    ) -> None:
        self.stands = False  # the mesh has been ready
        self._changed = changed
        self._restart = restart
        self._move = move
        self._probe = partial(probe, tls=tls)
        self._processes: dict[str, ManagedProcess] = {}
        self._joined: set[str] = set()
        self._group: asyncio.TaskGroup | None = None
        self._change = asyncio.Event()

    @property
    def processes(self) -> list[ManagedProcess]:
        """All of them, each role after those that it stands on."""
        return sorted(self._processes.values(), key=lambda p: (-STOP_ORDER.index(p.spec.role), p.spec.index))

    def joined(self, role: str) -> list[ProcessSpec]:
        """Those of a role that peers and clients may know of."""
        return [p.spec for p in self.processes if p.spec.role == role and p.spec.name in self._joined]

    def is_joined(self, process: ManagedProcess) -> bool:
        return process.spec.name in self._joined

    def indices(self) -> dict[str, set[int]]:
        """Which there are of each role."""
        found: dict[str, set[int]] = {}
        for process in self._processes.values():
            found.setdefault(process.spec.role, set()).add(process.spec.index)
        return found

    def run_in(self, group: asyncio.TaskGroup) -> None:
        """Start what was added, and from now on what will be. A joined process that cannot be kept up fails `group`."""
        self._group = group
        for process in self._processes.values():
            group.create_task(self._keep(process), name=process.spec.name)

    def add(self, specs: Iterable[ProcessSpec]) -> list[ManagedProcess]:
        """They start, and have not joined."""
        added = [
            ManagedProcess(spec, self._probe, self._on_change, restart=self._restart, move=self._move_of(spec))
            for spec in specs
        ]
        for process in added:
            self._processes[process.spec.name] = process
            if self._group is not None:
                self._group.create_task(self._keep(process), name=process.spec.name)
        return added

    def _move_of(self, spec: ProcessSpec) -> Move | None:
        """Valkey stays where it is: others were told of it when they were started."""
        return self._move if spec.role != "valkey" else None

    def join(self, processes: Iterable[ManagedProcess]) -> None:
        """Peers and clients may know of them."""
        self._joined.update(process.spec.name for process in processes)
        self._on_change()

    def part(self, processes: Iterable[ManagedProcess]) -> None:
        """No peer or client should turn to them any more."""
        self._joined.difference_update(process.spec.name for process in processes)
        self._on_change()

    async def stop(self, processes: Iterable[ManagedProcess]) -> list[str]:
        """End them, all at once, each within its grace. Returns the names of those that had to be killed."""
        async with asyncio.TaskGroup() as group:
            ending = {
                process.spec.name: group.create_task(process.stop(_grace_s(process.spec))) for process in processes
            }
        return [name for name, in_time in ending.items() if not in_time.result()]

    async def remove(self, processes: Iterable[ManagedProcess]) -> list[str]:
        """Stop them and forget them. Returns the names of those that had to be killed."""
        leaving = list(processes)
        killed = await self.stop(leaving)
        for process in leaving:
            del self._processes[process.spec.name]
        self.part(leaving)
        return killed

    async def change(self) -> None:
        """Wait until a process has changed."""
        await self._change.wait()

    def _on_change(self) -> None:
        change, self._change = self._change, asyncio.Event()
        change.set()
        self._changed()

    async def _keep(self, process: ManagedProcess) -> None:
        try:
            await process.run()
        except StartFailed as failure:
            if self.is_joined(process) and not (self.stands and process.spec.role == "cache"):
                raise
            logger.warning("%s", failure)
            process.give_up(failure)


def _grace_s(spec: ProcessSpec) -> float:
    return grace_s(spec.role, os.environ | spec.env)
