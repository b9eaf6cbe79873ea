"""`shoal down`: stop the running mesh and make sure that nothing of it is left."""

from typing import Annotated

import typer

from mesh.cli.problem import Problem

Timeout = Annotated[float, typer.Option(help="Seconds before what is left is killed.")]


def command(timeout_s: Timeout = 90.0) -> None:
    """Drain and stop the mesh that `shoal up` started. Leaves no process behind."""
    import psutil
    from rich.console import Console

    from mesh.cli import state

    console = Console()
    mesh = state.last()
    supervisor = mesh.supervisor() if mesh is not None else None
    if mesh is None or supervisor is None:
        state.state_file().unlink(missing_ok=True)
        console.print("No mesh is running.")
        return
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
            f"logs: {state.run_dir() / 'logs'}",
        )
    console.print("Stopped.")
