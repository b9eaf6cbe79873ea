"""A report for people: a table and bars in the terminal, or the table as Markdown to paste. Pure but for rich."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from mesh.bench.machine import words
from mesh.bench.report import Report, Row

if TYPE_CHECKING:
    from rich.console import RenderableType

HEAD = ("metric", "value", "unit", "peer", "peer's", "ratio", "goal", "met")
BAR_CELLS = 30
_COLOURS = {"yes": "green", "no": "red", "?": "yellow"}


def number(value: float | None) -> str:
    """Three significant digits, whole numbers whole."""
    if value is None:
        return ""
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def cells(row: Row) -> tuple[str, ...]:
    """A row's texts, in the order of HEAD."""
    met = "" if row.goal is None else {True: "yes", False: "no", None: "?"}[row.met]
    value = "–" if row.value is None else number(row.value)
    goal = "" if row.goal is None else str(row.goal)
    return (
        row.metric, value, row.unit, row.peer or "", number(row.peer_value), number(row.ratio), goal, met,
    )  # fmt: skip


def used(rows: Iterable[Row]) -> list[int]:
    """Indices of the columns that say something in at least one row."""
    texts = [cells(row) for row in rows]
    return [index for index in range(len(HEAD)) if index < 2 or any(text[index] for text in texts)]


def rich_table(report: Report) -> "RenderableType":
    """The whole report for a terminal; rows with peers have a table of their own, so that both fit."""
    from rich.console import Group
    from rich.text import Text

    alone = [row for row in report.rows if row.peer is None]
    beside = [row for row in report.rows if row.peer is not None]
    tables: list[RenderableType] = []
    for rows in (alone, beside):
        tables += [Text(), _table_of(rows)] if rows else []
    notes = [Text(f"{row.metric}: {row.note}", style="yellow") for row in report.rows if row.note]
    head = Text(f"shoal bench {report.bench}, {report.date}", style="bold")
    return Group(head, Text(words(report.machine)), Text(told(report.ran_on)), *tables, *notes)


def _table_of(rows: Sequence[Row]) -> "RenderableType":
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    columns = used(rows)
    for index in columns:
        table.add_column(HEAD[index], justify="right" if HEAD[index] in ("value", "peer's", "ratio") else "left")
    for row in rows:
        texts = cells(row)
        table.add_row(*(Text(texts[index], style=_COLOURS.get(texts[index], "")) for index in columns))
    return table


def markdown(report: Report) -> str:
    """The report as it stands in docs/benchmarks.md."""
    columns = used(report.rows)
    lines = [
        f"{report.date[:10]} · {words(report.machine)}",
        "",
        told(report.ran_on),
        "",
        "```sh",
        report.command,
        "```",
        "",
        _line(HEAD[index] for index in columns),
        _line("---" for _ in columns),
        *(_line(cells(row)[index] for index in columns) for row in report.rows),
    ]
    notes = [f"{row.metric}: {row.note}." for row in report.rows if row.note]
    return "\n".join([*lines, *([""] if notes else []), *notes]) + "\n"


def bars(title: str, figures: Sequence[tuple[str, float]], unit: str) -> "RenderableType":
    """A horizontal bar for each (label, figure), the longest BAR_CELLS wide."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    most = max((value for _, value in figures), default=0.0) or 1.0
    table = Table(box=None, show_header=False, pad_edge=False)
    for _ in range(3):
        table.add_column(no_wrap=True)
    for label, value in figures:
        eighths = max(0, round(8 * BAR_CELLS * value / most))
        bar = "█" * (eighths // 8) + ("", *"▏▎▍▌▋▊▉")[eighths % 8]
        table.add_row(label, Text(bar, style="cyan"), f"{number(value)} {unit}")
    return Group(Text(), Text(title, style="bold"), table)


def told(ran_on: dict[str, Any]) -> str:
    """What it ran on, in one line."""
    return ", ".join(f"{name} {value}" for name, value in ran_on.items() if value not in (None, ""))


def _line(texts: Iterable[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"
