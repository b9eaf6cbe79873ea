"""The local mesh as one tree of processes: started in order, kept running, scaled, stopped so that no request is lost.

Gateways stop first and wait for their streams, then workers, schedulers, caches and Valkey, each within its drain time.
"""

import asyncio
import os
from collections.abc import Callable, Iterable, Sequence

import psutil

from mesh import models
from mesh.cli import control, state
from mesh.cli.fleet import Fleet
from mesh.cli.grace import stop_s
from mesh.cli.plan import Layout, MeshPlan, ProcessSpec
from mesh.cli.ports import FIRST_GRPC_PORT, FIRST_HTTP_PORT, HOST, PlanError
from mesh.cli.probes import operator, scheme
from mesh.cli.process import ManagedProcess
from mesh.cli.roles import MOST, STOP_ORDER, BadScale, check
from mesh.cli.scaling import ScaleFailed, Scaling
from mesh.tls import Tls, TlsError


class Supervisor:
    """Owns every process of a local mesh. `on_change` hears of each new state."""

    def __init__(self, plan: MeshPlan, on_change: Callable[[state.MeshState], None] = lambda _: None) -> None:
        self._plan = plan
        self._on_change = on_change
        self._phase = "starting"
        self._message = ""
        self._notices: list[str] = []
        layout = Layout(plan)
        self._tls = operator_of(plan)
        self._fleet = Fleet(self._hear, restart=plan.restart, tls=self._tls, move=layout.moved)
        self._scaling = Scaling(self._fleet, layout, self._tls)
        self._first = self._fleet.add(layout.first())

    async def run(self, stopping: asyncio.Event) -> None:
        """Start everything, keep it running until `stopping` is set, stop everything. Raises StartFailed."""
        self._fleet.join(self._first)
        self._scaling.publish()
        try:
            async with asyncio.TaskGroup() as group:
                self._fleet.run_in(group)
                helpers = [group.create_task(work) for work in (self._announce_ready(), control.serve(self._scale))]
                group.create_task(self._stop_when(stopping, helpers))
        except* Exception as failures:
            self._phase, self._message = "failed", "\n".join(str(error) for error in failures.exceptions)
            await self._stop_all()
            self._publish()
            raise failures.exceptions[0] from None

    async def _announce_ready(self) -> None:
        """The mesh stands when all but its caches are ready: it works without those, if more slowly."""
        for process in self._first:
            if process.spec.role != "cache":
                await process.ready.wait()
        self._phase, self._fleet.stands = "ready", True
        self._notices = [*moved_ports(self._plan, self._fleet.joined("gateway")), *unread_variables(self._first)]
        self._publish()

    async def _stop_when(self, stopping: asyncio.Event, helpers: Iterable["asyncio.Task[None]"]) -> None:
        await stopping.wait()
        self._phase = "stopping"
        # One may wait for ever for a process that never comes up, the other starts processes.
        for helper in helpers:
            helper.cancel()
        self._publish()
        await self._stop_all()
        state.state_file().unlink(missing_ok=True)

    async def _scale(self, request: control.Scale, say: control.Say) -> None:
        """Carry out one request and say how it goes."""
        try:
            check(request.wanted)
            self._check_stands()
            say(control.Accepted())
            killed = await self._scaling.scale(
                request.wanted, request.timeout_s, lambda process, how: say(control.Progress(process, how))
            )
        except (BadScale, ScaleFailed) as error:
            say(control.Refused(str(error)))
            return
        counts = {role: len(self._fleet.joined(role)) for role in MOST}
        say(control.Done(counts, killed))

    def _check_stands(self) -> None:
        if self._phase == "starting":
            raise BadScale("the mesh is still starting; `shoal status` tells when it is ready")
        if self._phase != "ready":
            raise BadScale(f"the mesh is {self._phase}")

    def kill(self) -> None:
        """End every process at once, for somebody who will not wait for the draining."""
        for process in self._fleet.processes:
            process.kill()

    async def _stop_all(self) -> None:
        for role in STOP_ORDER:
            await self._fleet.stop(process for process in self._fleet.processes if process.spec.role == role)

    def snapshot(self) -> state.MeshState:
        gateways = self._fleet.joined("gateway")
        return state.MeshState(
            supervisor_pid=os.getpid(),
            supervisor_created=psutil.Process().create_time(),
            phase=self._phase_now(),
            model=models.folder_of(self._plan.model).name,
            http_urls=[f"{scheme(self._tls)}://{HOST}:{spec.ports['http']}" for spec in gateways],
            grpc_addresses=[spec.address for spec in gateways],
            scheduler_addresses=[spec.address for spec in self._fleet.joined("scheduler")],
            processes=[process.state() for process in self._fleet.processes],
            message=self._message,
            notices=self._notices,
            tls_dir=self._plan.tls_dir,
            stop_s=stop_s((process.spec.role for process in self._fleet.processes), os.environ),
        )

    def _phase_now(self) -> str:
        """Once ready, the mesh is degraded while a process that belongs to it is not."""
        whole = all(process.phase == "ready" for process in self._fleet.processes if self._counts(process))
        return "degraded" if self._phase == "ready" and not whole else self._phase

    def _counts(self, process: ManagedProcess) -> bool:
        """Not what comes or goes by scaling, nor a cache that has not come up yet."""
        coming = process.spec.role == "cache" and process.phase == "starting"
        return self._fleet.is_joined(process) and not coming

    def _hear(self) -> None:
        """Something of a process has changed."""
        self._scaling.follow()
        self._publish()

    def _publish(self) -> None:
        snapshot = self.snapshot()
        state.write(snapshot)
        self._on_change(snapshot)


def operator_of(plan: MeshPlan) -> Tls | None:
    """Who the supervisor is to the processes of the planned mesh. Raises PlanError."""
    try:
        return operator(plan.tls_dir)
    except TlsError as error:
        raise PlanError(str(error)) from None


def moved_ports(plan: MeshPlan, gateways: Sequence[ProcessSpec]) -> list[str]:
    """A sentence for each port that somebody named and did not get."""
    first = gateways[0]
    wanted = (
        ("HTTP", plan.first_http_port, FIRST_HTTP_PORT, first.ports["http"]),
        ("gRPC", plan.first_grpc_port, FIRST_GRPC_PORT, first.ports["grpc"]),
    )
    return [
        f"{use} port {named} was taken, so {first.name} listens on {given}"
        for use, named, default, given in wanted
        if named not in (default, given)
    ]


def unread_variables(started: Iterable[ManagedProcess]) -> list[str]:
    """A sentence for each variable that nothing reads: several services may report it, the one with a guess is best."""
    best: dict[str, str] = {}
    for sentence in sorted(set().union(*(process.unread_variables() for process in started)), key=len):
        best[sentence.split()[0]] = sentence
    return [best[variable] for variable in sorted(best)]
