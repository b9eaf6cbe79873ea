"""What a benchmark found, in the one shape that all of them write: rows with peers and goals, and what it ran on.

    {"bench", "date", "machine", "command", "ran_on", "rows": [
        {"metric", "value", "unit", "peer", "peer_value", "ratio", "goal", "met"}]}

`met` is computed here and nowhere else. A row may have a "note": why there is no value, or what is special about it.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

# Exit codes of `shoal bench`.
ALL_MET = 0
GOAL_MISSED = 1
NOT_MEASURED = 2


class CannotMeasure(Exception):
    """The benchmark cannot give its figures. The message says why, and what to do about it."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What a row's figure must be: `than` and a number, or `of` = "peer value" or "ratio" instead of the value."""

    than: Literal["<=", ">=", "=", "<", ">"]
    number: float | None = None
    of: Literal["value", "peer", "ratio"] = "value"

    def __str__(self) -> str:
        if self.of == "peer":
            return f"{self.than} peer"
        return f"{'ratio ' if self.of == 'ratio' else ''}{self.than} {self.number:g}"

    def is_met(self, row: "Row") -> bool | None:
        """None where a figure that it needs is missing."""
        figure = row.ratio if self.of == "ratio" else row.value
        bound = row.peer_value if self.of == "peer" else self.number
        if figure is None or bound is None:
            return None
        match self.than:
            case "<=":
                return figure <= bound
            case ">=":
                return figure >= bound
            case "<":
                return figure < bound
            case ">":
                return figure > bound
            case _:
                return figure == bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure. `ratio` is that of the pairs where a peer was measured in pairs, else value / peer value."""

    metric: str
    value: float | None
    unit: str = ""
    peer: str | None = None
    peer_value: float | None = None
    pair_ratio: float | None = None
    goal: Goal | None = None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        if self.pair_ratio is not None:
            return self.pair_ratio
        return self.value / self.peer_value if self.value is not None and self.peer_value else None

    @property
    def met(self) -> bool | None:
        """None without a goal, and where it could not be measured."""
        return self.goal.is_met(self) if self.goal is not None else None

    def as_json(self) -> dict[str, Any]:
        row: dict[str, Any] = {
            "metric": self.metric,
            "value": _rounded(self.value),
            "unit": self.unit,
            "peer": self.peer,
            "peer_value": _rounded(self.peer_value),
            "ratio": _rounded(self.ratio),
            "goal": str(self.goal) if self.goal is not None else None,
            "met": self.met,
        }
        return row | ({"note": self.note} if self.note else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One run of one benchmark. `ran_on` tells engine, model, precision, commit and versions.

    Not `whole`: a part of what was asked for has no rows but one that says why.
    """

    bench: str
    date: str
    machine: dict[str, Any]
    command: str
    ran_on: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    whole: bool = True

    @property
    def exit_code(self) -> int:
        """2 if a row with a goal has no figure or a part is missing, else 1 if one misses its goal, else 0."""
        verdicts = [row.met for row in self.rows if row.goal is not None]
        if not self.whole or not self.rows or None in verdicts:
            return NOT_MEASURED
        return ALL_MET if all(verdicts) else GOAL_MISSED

    def as_json(self) -> dict[str, Any]:
        return {
            "bench": self.bench,
            "date": self.date,
            "machine": self.machine,
            "command": self.command,
            "ran_on": self.ran_on,
            "rows": [row.as_json() for row in self.rows],
        }


def _rounded(value: float | None) -> float | None:
    """Six significant digits: more would be noise, and files of two runs should be easy to compare."""
    return None if value is None else float(f"{value:.6g}")
