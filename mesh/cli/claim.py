"""Who may run the mesh of this home: whoever holds a lock on `run/supervisor.lock`, from before the start to its end.

The kernel lets go of it when its last holder ends, however that happens. Nothing of a running mesh (state, targets,
sockets, logs) is touched by a command that wants to start one and does not get the lock.
"""

import fcntl
import os

from mesh.cli import state
from mesh.cli.problem import Problem


def take() -> int:
    """Hold the lock until the descriptor is closed or its processes end. Raises Problem if a mesh is there."""
    descriptor = _open()
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise _there_already(state.running()) from None
    if (mesh := state.running()) is not None:
        os.close(descriptor)
        raise _there_already(mesh)
    return descriptor


def is_taken() -> bool:
    """Whether a mesh runs here, is about to start or has not quite ended."""
    descriptor = _open()
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _open() -> int:
    state.run_dir().mkdir(parents=True, exist_ok=True)
    return os.open(state.run_dir() / "supervisor.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _there_already(mesh: state.MeshState | None) -> Problem:
    advice = "`shoal status` shows it, `shoal down` stops it"
    if mesh is None:
        return Problem("a mesh is starting", f"{advice}, as soon as it has begun")
    if mesh.phase == "stopping":
        return Problem("the mesh is stopping", "`shoal down` waits until it has ended; then start it again")
    how = "is starting" if mesh.phase == "starting" else "runs already"
    return Problem(f"a mesh {how} (supervisor {mesh.supervisor_pid})", advice)
