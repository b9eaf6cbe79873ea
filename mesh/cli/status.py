"""`shoal status`: the running mesh, as a table or as JSON."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from mesh.cli.problem import Problem

if TYPE_CHECKING:
    from mesh.cli.state import MeshState
    from shoal.scheduler.v1 import scheduler_pb2

Json = Annotated[bool, typer.Option("--json", help="One JSON object: phase, urls, processes, workers, queues.")]


def command(json: Json = False) -> None:
    """Show the running mesh. Exit code 1 if there is none or it is not ready."""
    import asyncio

    import msgspec
    from rich.console import Console

    from mesh.cli import claim, state, view

    mesh = state.running()
    if mesh is None:
        begins = claim.is_taken()
        if json:
            typer.echo('{"phase": "starting"}' if begins else '{"phase": "down"}')
            raise typer.Exit(1)
        if begins:
            raise Problem("a mesh is starting or ending just now", "try again in a moment")
        raise Problem("no mesh is running", "start one with `shoal up`")
    load = asyncio.run(view.mesh_load(mesh))
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(_document(mesh, load)), indent=2))
    else:
        console = Console()
        console.print(view.table(mesh, load))
        console.print(f"\n{view.doors(mesh)}\nLogs: {state.logs_dir()}", highlight=False, markup=False, soft_wrap=True)
    if mesh.phase != "ready":
        raise typer.Exit(1)


def _document(mesh: "MeshState", load: "scheduler_pb2.MeshLoad | None") -> dict[str, Any]:
    import msgspec
    from google.protobuf.json_format import MessageToDict

    document: dict[str, Any] = msgspec.to_builtins(mesh)
    if load is not None:
        document |= MessageToDict(load, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return document
