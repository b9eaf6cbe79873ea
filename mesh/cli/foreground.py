"""`shoal up` in a terminal: the supervisor beside a live table. Ctrl-C drains and stops, a second one kills."""

import asyncio
import signal
from contextlib import suppress

from rich.console import Console
from rich.live import Live

from mesh.cli import state, view
from mesh.cli.changes import Changes
from mesh.cli.plan import MeshPlan
from mesh.cli.process import StartFailed
from mesh.cli.state import MeshState
from mesh.cli.supervisor import Supervisor

REFRESH_S = 1.0


class Foreground:
    """Runs a mesh until a signal. Raises StartFailed if it does not come up within `timeout_s`."""

    def __init__(self, plan: MeshPlan, timeout_s: float) -> None:
        self._console = Console()
        self._timeout_s = timeout_s
        self._stopping = asyncio.Event()
        self._ready = asyncio.Event()
        self._changes = Changes()
        self._failure: StartFailed | None = None
        self._supervisor = Supervisor(plan, self._hear)

    async def run(self) -> None:
        """Until Ctrl-C or SIGTERM."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop)
        async with asyncio.TaskGroup() as group:
            helpers = [group.create_task(self._give_up_late())]
            if self._console.is_terminal:
                helpers.append(group.create_task(self._show()))
            try:
                await self._supervisor.run(self._stopping)
            except StartFailed as failure:
                self._failure = failure
            finally:
                # They wait for a mesh that may never be ready: it is gone now.
                for helper in helpers:
                    helper.cancel()
        if self._failure is not None:
            raise self._failure
        self._console.print("Stopped.")

    def _stop(self) -> None:
        """The first signal drains; another one, by somebody who will not wait for that, kills."""
        if self._stopping.is_set():
            self._console.print("Killing what is left …")
            self._supervisor.kill()
            return
        self._stopping.set()
        self._console.print("Draining and stopping … (Ctrl-C again kills)", highlight=False)

    def _hear(self, mesh: MeshState) -> None:
        if not self._console.is_terminal:
            for line in self._changes.since_last(mesh):
                self._console.print(line, highlight=False, soft_wrap=True)
        if mesh.phase == "ready" and not self._ready.is_set():
            self._ready.set()
            self._console.print(view.things_to_try(mesh), highlight=False, markup=False, soft_wrap=True)
            self._console.print("Ctrl-C drains and stops everything.\n")

    async def _give_up_late(self) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._ready.wait()
        except TimeoutError:
            if not self._stopping.is_set():
                words = f"the mesh was not ready within {self._timeout_s:g} s; logs say why: {state.logs_dir()}"
                self._failure = StartFailed(words)
                self._stopping.set()

    async def _show(self) -> None:
        """A live table until the mesh is to stop."""
        with Live(console=self._console, auto_refresh=False, transient=True) as live:
            while not self._stopping.is_set():
                mesh = self._supervisor.snapshot()
                load = await view.mesh_load(mesh) if self._ready.is_set() else None
                live.update(view.table(mesh, load), refresh=True)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), REFRESH_S)
