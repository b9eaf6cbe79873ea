"""The `shoal` command line: its commands, one line each.

A command's module is imported here, so it imports what is heavy (grpc, rich, tokenizers, torch) inside its functions:
`shoal --help` must be instant, and tests/mesh/cli/test_main.py holds it to that.
"""

from typing import Annotated

import typer

from mesh.cli import bench, certs, chat, doctor, down, pull, scale, status, up
from mesh.cli.problem import Problem

# rich would draw boxes around the help and double the time it takes.
app = typer.Typer(
    name="shoal",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="An inference mesh.",
)
app.command("up")(up.command)
app.command("chat")(chat.command)
app.command("status")(status.command)
app.command("scale")(scale.command)
app.command("down")(down.command)
app.command("pull")(pull.command)
app.command("certs")(certs.command)
app.command("doctor")(doctor.command)
app.add_typer(bench.app, name="bench")


def _tell_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"shoal {version('shoal')}")
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Show it and exit.")]


@app.callback()
def _root(version: Version = False) -> None:
    """An inference mesh: pull a model, start the mesh, talk to it."""


def run() -> None:
    """Entry point. A Problem becomes its words on stderr and exit code 1."""
    try:
        app()
    except Problem as problem:
        typer.secho(f"shoal: {problem.message}", fg="red", err=True)
        if problem.advice:
            typer.echo(f"       {problem.advice}", err=True)
        raise SystemExit(1) from None


if __name__ == "__main__":
    run()
