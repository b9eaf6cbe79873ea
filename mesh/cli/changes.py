"""What happens to the processes of a mesh, a line each, for whoever has no terminal to watch a table in."""

from mesh.cli.state import MeshState, ProcessState


class Changes:
    """Compares each state of the mesh with the one before it."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}  # each process's state, by its name

    def since_last(self, mesh: MeshState) -> list[str]:
        """What is new. That a mesh which starts has processes, and one that stops loses them, goes without saying."""
        before, self._known = self._known, {process.name: process.state for process in mesh.processes}
        stands = mesh.phase in ("ready", "degraded")
        told = [
            words
            for process in mesh.processes
            if before.get(process.name) != process.state and (words := _words(process, stands))
        ]
        gone = [name for name in before if name not in self._known]
        return told + [f"{name} is gone" for name in gone if stands]


def _words(process: ProcessState, stands: bool) -> str:
    match process.state:
        case "ready":
            return f"{process.name} is ready"
        case "restarting":
            return f"{process.name} {process.why or 'ended'} and is started again"
        case "failed":
            return f"{process.name} has failed: {process.why or 'its log says why'}"
        case "starting" | "stopping" if stands:
            return f"{process.name} is {process.state}"
    return ""
