"""`shoal doctor`: checks this machine for what a mesh needs, and says what is missing and what to do about it."""

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.text import Text

    from mesh.cli.machine import Finding

STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}

Json = Annotated[
    bool, typer.Option("--json", help="One JSON object: `ok`, and `findings` with check, level, seen, advice.")
]


def command(json: Json = False) -> None:
    """Check this machine: Python, packages, memory, disk, CPU, GPU, model, ports. Exit code 1 if something fails."""
    from rich.console import Console

    console = Console()
    if json:
        findings = list(examine())
        typer.echo(_document(findings))
    else:
        findings = []
        for finding in examine():
            findings.append(finding)
            console.print(_line(finding), soft_wrap=True)
    if any(finding.level == "fail" for finding in findings):
        raise typer.Exit(1)


def examine() -> "Iterator[Finding]":
    """Every check, in the order in which a mesh would stumble."""
    from mesh.cli import dependencies, machine
    from mesh.models import cache_dir

    yield machine.python()
    yield from dependencies.findings()
    yield machine.memory()
    yield machine.disk(cache_dir())
    yield machine.cores()
    yield machine.gpu()
    yield model(os.environ.get("SHOAL_MODEL"))
    yield from ports()
    yield machine.valkey()
    yield machine.collector(os.environ.get("SHOAL_OTLP_ENDPOINT", ""))


def model(name: str | None) -> "Finding":
    """Whether the model of `shoal up` is there, whole, and for a known one the very bytes that were pinned."""
    from mesh.cli.catalogue import CATALOGUE
    from mesh.cli.machine import Finding
    from mesh.cli.pull import is_complete
    from mesh.errors import InvalidRequest
    from mesh.models import DEFAULT_MODEL, find

    name = name or DEFAULT_MODEL
    entry = CATALOGUE.get(name)
    try:
        folder = find(name)
    except InvalidRequest as error:
        return Finding("model", "warn" if entry else "fail", error.message, f"shoal pull {name}" if entry else "")
    if entry is None:
        return Finding("model", "ok", f"{name} in {folder.path} (no checksum is known for it)")
    if not is_complete(entry, folder.path):
        return Finding("model", "fail", f"{name} in {folder.path} is damaged", f"shoal pull {name} --force")
    return Finding("model", "ok", f"{name}, sha256 verified, in {folder.path}")


def ports() -> "Iterator[Finding]":
    """The ports `shoal up` takes first; of no interest while a mesh of this user runs on them."""
    from mesh.cli import machine, state
    from mesh.cli.plan import MeshPlan

    mesh = state.running()
    if mesh is not None:
        yield machine.Finding("ports", "ok", f"a mesh is running: {mesh.http_url}, gRPC {mesh.grpc_address}")
        return
    plan = MeshPlan(model="")
    yield machine.port(plan.first_http_port, "HTTP")
    yield machine.port(plan.first_grpc_port, "gRPC")


def _document(findings: "list[Finding]") -> str:
    import json

    ok = all(finding.level != "fail" for finding in findings)
    return json.dumps({"ok": ok, "findings": [asdict(finding) for finding in findings]}, indent=2, ensure_ascii=False)


def _line(finding: "Finding") -> "Text":
    from rich.text import Text

    line = Text.assemble((f"{finding.level:<5}", STYLES[finding.level]), f"{finding.check:<13} {finding.seen}")
    if finding.advice:
        line.append(f"\n      {finding.advice}")
    return line
