"""Process CPU by role: seconds of user and system time of every process that plays it."""

from collections.abc import Iterable

import psutil

from mesh.bench.report import CannotMeasure
from mesh.cli.state import ProcessState


class RoleClock:
    """Reads the CPU time of a mesh's processes, made when the mesh is ready. A worker's child is the engine."""

    def __init__(self, processes: Iterable[ProcessState]) -> None:
        self._by_role: dict[str, list[psutil.Process]] = {}
        for state in processes:
            if state.pid is None:
                continue
            process = psutil.Process(state.pid)
            role = "redis" if state.role == "valkey" else state.role
            self._by_role.setdefault(role, []).append(process)
            for child in process.children(recursive=True):
                self._by_role.setdefault("engine" if role == "worker" else role, []).append(child)

    def read(self) -> dict[str, float]:
        """Seconds since each process began, summed by role. Raises CannotMeasure if one has ended."""
        return {role: sum(map(seconds, processes)) for role, processes in self._by_role.items()}


def seconds(process: psutil.Process) -> float:
    """User and system time of one process, without its children. Raises CannotMeasure if it has ended."""
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        raise CannotMeasure(f"process {process.pid} ended while it was measured") from None
    return times.user + times.system


def difference(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {role: after[role] - before[role] for role in before}
