"""`shoal up` in a terminal: the supervisor beside a live table; Ctrl-C drains and stops everything."""

import asyncio
import signal
from contextlib import suppress

from rich.console import Console
from rich.live import Live

from mesh.cli import view
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
        self._supervisor = Supervisor(plan, self._hear)

    async def run(self) -> None:
        """Until Ctrl-C or SIGTERM."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stopping.set)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._supervisor.run(self._stopping))
                group.create_task(self._wait_until_ready())
                show = group.create_task(self._show() if self._console.is_terminal else self._tell())
                await self._stopping.wait()
                show.cancel()
                self._console.print("Draining and stopping …")
        except* StartFailed as failures:
            raise failures.exceptions[0] from None
        self._console.print("Stopped.")

    def _hear(self, mesh: MeshState) -> None:
        if mesh.phase == "ready":
            self._ready.set()
        elif mesh.phase == "failed":
            self._stopping.set()

    async def _wait_until_ready(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                await self._ready.wait()
            self._console.print(
                view.things_to_try(self._supervisor.snapshot()), highlight=False, markup=False, soft_wrap=True
            )
            self._console.print("Ctrl-C drains and stops everything.\n")
            return
        if not self._stopping.is_set():
            raise StartFailed(f"the mesh was not ready within {self._timeout_s:g} s; logs say why")

    async def _show(self) -> None:
        with Live(console=self._console, auto_refresh=False, transient=True) as live:
            while True:
                mesh = self._supervisor.snapshot()
                load = await view.mesh_load(mesh) if self._ready.is_set() else None
                live.update(view.table(mesh, load), refresh=True)
                await asyncio.sleep(REFRESH_S)

    async def _tell(self) -> None:
        """Without a terminal: a line for each process that becomes ready, then silence."""
        told: set[str] = set()
        while len(told) < len(self._supervisor.snapshot().processes):
            for process in self._supervisor.snapshot().processes:
                if process.state == "ready" and process.name not in told:
                    told.add(process.name)
                    self._console.print(f"{process.name} is ready")
            await asyncio.sleep(REFRESH_S / 5)
