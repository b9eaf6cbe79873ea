"""Process CPU by role: seconds of user and system time of every process that plays it."""

from collections.abc import Iterable

import psutil

from mesh.cli.state import ProcessState

# What a role's row says, by the state file's role; a worker's child that runs steps is the engine.
ROLES = ("gateway", "scheduler", "worker", "engine", "cache", "redis")


class RoleClock:
    """Reads the CPU time of a mesh's processes. Made when the mesh is ready; restarts in between are an error."""

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
        """Seconds since each process began, summed by role. Raises psutil.NoSuchProcess if one has ended."""
        return {role: sum(map(seconds, processes)) for role, processes in self._by_role.items()}


def seconds(process: psutil.Process) -> float:
    """User and system time of one process, without its children."""
    times = process.cpu_times()
    return times.user + times.system


def difference(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {role: after[role] - before[role] for role in before}
