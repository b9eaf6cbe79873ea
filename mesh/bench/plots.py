"""What of a report is easier to see than to read: latency percentiles, throughput by streams, CPU by process."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mesh.bench.report import Report
from mesh.bench.table import bars

if TYPE_CHECKING:
    from rich.console import RenderableType


def of(report: Report) -> Iterator["RenderableType"]:
    """One drawing for each group of rows: those whose metrics differ only behind the comma share one, by unit."""
    groups: dict[tuple[str, str], list[tuple[str, float]]] = {}
    for row in report.rows:
        head, comma, tail = row.metric.partition(", ")
        if not comma or row.value is None:
            continue
        figures = groups.setdefault((head, row.unit), [])
        ours = (tail if row.peer is None else f"{tail}, shoal", row.value)
        if ours not in figures:  # beside a second peer it stands again
            figures.append(ours)
        if row.peer is not None and row.peer_value is not None:
            figures.append((f"{tail}, {row.peer}", row.peer_value))
    for (head, unit), figures in groups.items():
        if len(figures) > 1:
            yield bars(head, figures, unit)
