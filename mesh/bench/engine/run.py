"""Runs the sections that were asked for, one after the other, and puts them into one report."""

from collections.abc import Callable, Mapping

from mesh.bench import machine
from mesh.bench.engine import curves, interference, perplexity, precision, start, static
from mesh.bench.engine.plan import EnginePlan, Found
from mesh.bench.report import CannotMeasure, Report, Row

Section = Callable[[EnginePlan], Found]
SECTIONS: Mapping[str, Section] = {
    "interference": interference.measure,
    "static": static.measure,
    "perplexity": perplexity.measure,
    "start": start.measure,
    "curves": curves.measure,
    "precision": precision.measure,
}


def measure(plan: EnginePlan, command: str) -> Report:
    """A section that cannot be measured is a row with the reason, the others go on. Raises if it is the only one."""
    before = machine.describe()
    rows: list[Row] = []
    facts: dict[str, object] = {"model": plan.model}
    whole = True
    for name in plan.only:
        try:
            found = SECTIONS[name](plan)
        except CannotMeasure as reason:
            if len(plan.only) == 1:
                raise
            rows.append(Row(metric=f"not measured: {name}", value=None, note=str(reason)))
            whole = False
            continue
        rows += found.rows
        facts |= found.facts
    return Report(
        bench="engine",
        date=machine.now(),
        machine=before,
        command=command,
        ran_on=facts | machine.software(),
        rows=rows,
        whole=whole,
    )
