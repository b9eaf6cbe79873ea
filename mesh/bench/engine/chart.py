"""Line charts as SVG text, both axes logarithmic: growth by a power is a straight line. Pure; no library draws here."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 460, 300  # of one chart, its margins included
LEFT, RIGHT, TOP, BOTTOM = 58, 16, 34, 44
LEGEND_LINE = 16
FONT = 'font-family="sans-serif" font-size="11"'
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b")


@dataclass(frozen=True, slots=True)
class Line:
    """Points of positive numbers, x ascending. A limit is drawn dashed and without points."""

    name: str
    points: list[tuple[float, float]]
    limit: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """One drawing: its title, its axes' names and its lines."""

    title: str
    x: str
    y: str
    lines: Sequence[Line]


@dataclass(frozen=True, slots=True)
class Axis:
    """From a range of numbers to a range of pixels, by logarithms."""

    least: float
    most: float
    first: float
    last: float

    def at(self, value: float) -> float:
        share = (math.log(value) - math.log(self.least)) / (math.log(self.most) - math.log(self.least))
        return self.first + share * (self.last - self.first)


def svg(charts: Sequence[Chart], note: str) -> str:
    """The charts side by side, with a line of text below."""
    legend = LEGEND_LINE * max(len(chart.lines) for chart in charts)
    width, height = WIDTH * len(charts), HEIGHT + legend + 2 * LEGEND_LINE
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {FONT}>',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for number, chart in enumerate(charts):
        parts += [f'<g transform="translate({number * WIDTH},0)">', *_chart(chart), "</g>"]
    parts += [_text(LEFT, height - 8, note), "</svg>"]
    return "\n".join(parts) + "\n"


def _chart(chart: Chart) -> Iterator[str]:
    xs = [x for line in chart.lines for x, _ in line.points] or [1.0]
    ys = [y for line in chart.lines for _, y in line.points] or [1.0]
    across = Axis(min(xs), max(max(xs), 2 * min(xs)), LEFT, WIDTH - RIGHT)
    low, high = _around(min(ys), max(ys))
    up = Axis(low, high, HEIGHT - BOTTOM, TOP)
    yield _text(LEFT, TOP - 14, chart.title, weight="bold")
    for x in sorted(set(xs)):
        yield f'<path d="M{across.at(x):.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#eee"/>'
        yield _text(across.at(x), HEIGHT - BOTTOM + 15, f"{x:g}", anchor="middle")
    for y in _steps(low, high):
        yield f'<path d="M{LEFT} {up.at(y):.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>'
        yield _text(LEFT - 6, up.at(y) + 4, f"{y:g}", anchor="end")
    yield _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, chart.x, anchor="middle")
    yield _text(8, TOP - 14, chart.y)
    for number, line in enumerate(chart.lines):
        yield from _line(line, COLOURS[number % len(COLOURS)], across, up)
        yield from _key(line, COLOURS[number % len(COLOURS)], HEIGHT + number * LEGEND_LINE)


def _line(line: Line, colour: str, across: Axis, up: Axis) -> Iterator[str]:
    places = [(across.at(x), up.at(y)) for x, y in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{_dashes(line)}/>'
    if not line.limit:
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places)


def _key(line: Line, colour: str, y: float) -> Iterator[str]:
    yield f'<path d="M{LEFT} {y}h24" stroke="{colour}" stroke-width="2"{_dashes(line)}/>'
    yield _text(LEFT + 30, y + 4, line.name)


def _dashes(line: Line) -> str:
    return ' stroke-dasharray="5 4"' if line.limit else ""


def _around(least: float, most: float) -> tuple[float, float]:
    """The steps of 1, 2 and 5 around both, apart from each other."""
    steps = [*_steps(least / 10, most * 10)]
    low = max(step for step in steps if step <= least * 1.001)
    high = min(step for step in steps if step >= most * 0.999 and step > low)
    return low, high


def _steps(low: float, high: float) -> Iterator[float]:
    """1, 2 and 5 of each power of ten, from the one to the other."""
    for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        yield from (
            step for step in (10.0**power, 2 * 10.0**power, 5 * 10.0**power) if low <= step * 1.001 <= high * 1.002
        )


def _text(x: float, y: float, words: str, *, anchor: str = "start", weight: str = "normal") -> str:
    look = f'text-anchor="{anchor}" font-weight="{weight}" fill="#222"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {look}>{escape(words)}</text>'
