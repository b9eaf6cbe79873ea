"""Who may run the mesh of this home: whoever holds a lock on `run/supervisor.lock`, from before the start to its end.

The kernel lets go of it when its last holder ends, however that happens. Nothing of a running mesh (state, targets,
sockets, logs) is touched by a command that wants to start one and does not get the lock.
"""

import fcntl
import os
import time
from pathlib import Path

from mesh.cli import state
from mesh.cli.problem import Problem

LOOK_S = 0.05  # longer than `is_taken` holds the lock


def take() -> int:
    """Hold the lock until the descriptor is closed or its processes end. Raises Problem if a mesh is there."""
    state.run_dir().mkdir(parents=True, exist_ok=True)
    descriptor = os.open(_path(), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if not _locked(descriptor):
        time.sleep(LOOK_S)
        if not _locked(descriptor):
            os.close(descriptor)
            raise _there_already(state.running())
    if (mesh := state.running()) is not None:
        os.close(descriptor)
        raise _there_already(mesh)
    return descriptor


def is_taken() -> bool:
    """Whether a mesh runs here, is about to start or has not quite ended. If not, shares the lock for a blink."""
    try:
        descriptor = os.open(_path(), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not _locked(descriptor, fcntl.LOCK_SH)  # so that those who look do not see each other
    finally:
        os.close(descriptor)


def _locked(descriptor: int, how: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _path() -> Path:
    return state.run_dir() / "supervisor.lock"


def _there_already(mesh: state.MeshState | None) -> Problem:
    advice = "`shoal status` shows it, `shoal down` stops it"
    if mesh is None:
        return Problem("a mesh is starting", f"{advice}, as soon as it has begun")
    if mesh.phase == "stopping":
        return Problem("the mesh is stopping", "`shoal down` waits until it has ended; then start it again")
    if mesh.phase == "failed":
        return Problem("a mesh that did not start is ending", "try again in a moment")
    how = "is starting" if mesh.phase == "starting" else "runs already"
    return Problem(f"a mesh {how} (supervisor {mesh.supervisor_pid})", advice)
