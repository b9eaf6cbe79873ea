"""`shoal scale`: more or fewer processes of a role in the running mesh, while it answers."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from mesh.cli import roles
from mesh.cli.problem import Problem

if TYPE_CHECKING:
    from mesh.cli.control import Reply, Scale

INTERRUPTED = 130

Wanted = Annotated[
    list[str],
    typer.Argument(metavar="ROLE=COUNT...", help="How many there shall be: gateway, scheduler, worker, cache."),
]
Wait = Annotated[bool, typer.Option(help="Stay until it is done. Without, it goes on in the background.")]
Timeout = Annotated[float, typer.Option(min=1, help="Seconds that new processes may take to be ready.")]


def command(wanted: Wanted, wait: Wait = True, timeout_s: Timeout = 180.0) -> None:
    """Scale the running mesh, up or down, with no failed request.

    New processes are ready before any request reaches them; if one does not come up, the mesh stays as it was. Those
    that go, the highest numbers first, are taken out of discovery and drained.
    """
    try:
        counts = roles.parse(wanted)
    except roles.BadScale as error:
        raise Problem(f"{error}; nothing was done", "for example: shoal scale worker=3 gateway=2") from None
    from mesh.cli.control import Scale

    replies = _ask(Scale(counts, timeout_s))
    if wait:
        try:
            _show(replies)
        except KeyboardInterrupt:
            typer.echo("\nThe scaling goes on in the background: `shoal status` shows it; another scale waits for it.")
            raise typer.Exit(INTERRUPTED) from None
    else:
        next(replies)
        typer.echo("The mesh is being scaled; `shoal status` shows it.")


def _ask(request: "Scale") -> Iterator["Reply"]:
    """The supervisor's replies after it has accepted. Raises Problem without a mesh, and when it refuses."""
    from mesh.cli import control, state

    if (mesh := state.running()) is None:
        raise Problem("no mesh is running", "start one with `shoal up`")
    last: Reply | None = None
    try:
        for last in control.ask(request):
            if isinstance(last, control.Refused):
                raise Problem(f"nothing was changed: {last.message}", f"logs: {state.logs_dir()}")
            yield last
    except TimeoutError:
        advice = "it may still do what was asked: `shoal status` shows it"
        raise Problem(f"the mesh has not answered for {control.FIRST_REPLY_S:g} s", advice) from None
    except OSError as error:
        if last is None:
            raise Problem(f"the mesh is {mesh.phase} and takes no commands ({error.strerror})") from None
    if not isinstance(last, control.Done):
        raise Problem("the mesh ended meanwhile", f"logs: {state.logs_dir()}")


def _show(replies: Iterator["Reply"]) -> None:
    """A live table of what comes and goes, or a line for each step where there is no terminal."""
    from rich.console import Console
    from rich.live import Live

    from mesh.cli import control, view

    console = Console()
    steps: dict[str, str] = {}
    done: control.Done | None = None
    with Live(console=console, auto_refresh=False) as live:
        for reply in replies:
            if isinstance(reply, control.Done):
                done = reply
            if not isinstance(reply, control.Progress):
                continue
            steps[reply.process] = reply.state
            if console.is_terminal:
                live.update(view.steps(steps), refresh=True)
            else:
                console.print(f"{reply.process} {reply.state}".strip(), highlight=False)
    if done is not None:
        console.print(view.scaled(done.counts, done.killed), highlight=False)
