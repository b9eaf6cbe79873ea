"""What all of `shoal bench` share: run a measurement, show its report, end with its exit code."""

import os
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from mesh.cli.problem import Problem

if TYPE_CHECKING:
    from mesh.bench.report import Report

INTERRUPTED = 130


def command_line() -> str:
    """What was typed, ready to be typed again."""
    return shlex.join(["shoal", *sys.argv[1:]])


def run(measure: Callable[[], "Report"], json: Path | None, *, markdown: bool, plot: bool) -> None:
    """Measure, show, and end with the report's exit code."""
    from mesh.bench.report import NOT_MEASURED, CannotMeasure

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was started is stopped then, too
    try:
        check_writable(json)
        report = measure()
    except (CannotMeasure, Problem) as reason:
        typer.secho(f"shoal bench: {reason}", fg="red", err=True)
        raise typer.Exit(NOT_MEASURED) from None
    except KeyboardInterrupt:
        typer.echo("\nshoal bench: interrupted, nothing was written", err=True)
        raise typer.Exit(INTERRUPTED) from None
    _show(report, json, markdown=markdown, plot=plot)
    raise typer.Exit(report.exit_code)


def check_writable(file: Path | None) -> None:
    """Raise Problem for a report that could not be written, before it has taken its time to make."""
    if file is None or str(file) == "-":
        return
    folder = file.absolute().parent
    if file.is_dir() or not os.access(file if file.exists() else folder, os.W_OK):
        raise Problem(f"cannot write {file}", "name a file in a folder that is there and writable")


def _show(report: "Report", json: Path | None, *, markdown: bool, plot: bool) -> None:
    import msgspec
    from rich.console import Console

    from mesh.bench import plots, table

    if json is not None:
        text = msgspec.json.format(msgspec.json.encode(report.as_json())).decode() + "\n"
        if str(json) == "-":
            typer.echo(text, nl=False)
        else:
            json.write_text(text)
            typer.echo(f"written: {json}", err=True)
    if markdown:
        typer.echo(table.markdown(report), nl=False)
    elif json is None:
        Console().print(table.rich_table(report), highlight=False)
    if plot:
        for drawing in plots.of(report):
            Console(stderr=json is not None and str(json) == "-").print(drawing, highlight=False)
