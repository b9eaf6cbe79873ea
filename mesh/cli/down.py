"""`shoal down`: stop the running mesh and make sure that nothing of it is left."""

from typing import Annotated

import typer

from mesh.cli.problem import Problem

SPARE_S = 10.0  # for the supervisor itself, on top of its processes' time

Timeout = Annotated[
    float | None, typer.Option(help="Seconds before what is left is killed. Default: the mesh's own drain times.")
]


def command(timeout_s: Timeout = None) -> None:
    """Drain and stop the mesh that `shoal up` started. Leaves no process behind."""
    import psutil
    from rich.console import Console

    from mesh.cli import claim, state

    console = Console()
    mesh = state.last()
    supervisor = mesh.supervisor() if mesh is not None else None
    if mesh is None or supervisor is None:
        if claim.is_taken():
            raise Problem("a mesh is starting or ending just now", "try again in a moment")
        state.state_file().unlink(missing_ok=True)
        console.print("No mesh is running.")
        return
    if timeout_s is None:
        timeout_s = mesh.stop_s + SPARE_S
    family = [supervisor, *supervisor.children(recursive=True)]
    supervisor.terminate()
    with console.status("draining and stopping …"):
        _, left = psutil.wait_procs(family, timeout=timeout_s)
    for process in left:
        process.kill()
    psutil.wait_procs(left, timeout=10)
    state.state_file().unlink(missing_ok=True)
    if left:
        raise Problem(
            f"{len(left)} processes did not stop within {timeout_s:g} s and were killed",
            f"logs: {state.logs_dir()}",
        )
    console.print("Stopped.")
