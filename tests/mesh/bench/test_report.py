"""Rows, goals and exit codes; how a report looks."""

import json

import pytest
from rich.console import Console

from mesh.bench import machine, plots, table
from mesh.bench.report import Goal, Report, Row

MACHINE = {"cores": 2, "cpu": "a CPU", "vectors": "avx2", "memory_gib": 24.0, "system": "Debian", "load_before": 0.1}


def report(*rows: Row) -> Report:
    return Report(
        bench="load",
        date="2026-11-29T10:00:00+00:00",
        machine=MACHINE,
        command="shoal bench load",
        ran_on={"engine": "real", "commit": "abc"},
        rows=list(rows),
    )


@pytest.mark.parametrize(
    ("goal", "value", "met"),
    [
        (Goal(">=", 150), 150.0, True),
        (Goal(">=", 150), 149.9, False),
        (Goal("<=", 60), 61.0, False),
        (Goal("=", 0), 0.0, True),
        (Goal("<", of="peer"), 99.0, True),
        (Goal("<", of="peer"), 101.0, False),
        (Goal(">=", 3, of="ratio"), 300.0, True),
        (Goal(">=", 3, of="ratio"), 200.0, False),
        (Goal(">=", 150), None, None),
    ],
)
def test_met_is_computed_from_the_goal(goal, value, met):
    assert Row(metric="m", value=value, peer="p", peer_value=100.0, goal=goal).met is met


def test_a_row_without_a_goal_is_neither_met_nor_missed():
    assert Row(metric="m", value=1.0).met is None


def test_the_ratio_of_pairs_counts_where_there_are_pairs():
    assert Row(metric="m", value=10.0, peer="p", peer_value=5.0).ratio == 2
    assert Row(metric="m", value=10.0, peer="p", peer_value=5.0, pair_ratio=1.8).ratio == 1.8


def test_the_exit_code_says_met_missed_or_not_measured():
    good = Row(metric="m", value=1.0, goal=Goal("<=", 2))
    missed = Row(metric="m", value=3.0, goal=Goal("<=", 2))
    unknown = Row(metric="m", value=None, goal=Goal("<=", 2), note="no such machine")
    assert report(good, Row(metric="n", value=9.0)).exit_code == 0
    assert report(good, missed).exit_code == 1
    assert report(good, missed, unknown).exit_code == 2
    assert report().exit_code == 2
    # A peer that cannot run here is told, and fails nothing that was not promised.
    assert report(good, Row(metric="p", value=None, note="needs AVX-512")).exit_code == 0


def test_every_report_has_the_one_shape():
    written = json.loads(json.dumps(report(Row(metric="m", value=1 / 3, unit="s", goal=Goal("<", 1))).as_json()))
    assert set(written) == {"bench", "date", "machine", "command", "ran_on", "rows"}
    assert written["rows"] == [
        {
            "metric": "m",
            "value": 0.333333,
            "unit": "s",
            "peer": None,
            "peer_value": None,
            "ratio": None,
            "goal": "< 1",
            "met": True,
        }
    ]


def shown(drawing: object) -> str:
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(drawing)
        return console.export_text()


def test_the_table_leaves_out_columns_that_say_nothing():
    plain = shown(table.rich_table(report(Row(metric="m", value=2.0, unit="s"))))
    assert "peer" not in plain
    beside = shown(table.rich_table(report(Row(metric="m", value=2.0, peer="vLLM", peer_value=4.0, note="noisy"))))
    assert all(word in beside for word in ("vLLM", "0.5", "m: noisy", "2 cores of a CPU", "engine real"))


def test_markdown_can_be_pasted():
    text = table.markdown(report(Row(metric="a | b", value=1234.5, unit="tok/s", goal=Goal(">=", 9))))
    assert "| metric | value | unit | goal | met |\n| --- | --- | --- | --- | --- |\n" in text
    assert "| a \\| b | 1,234 | tok/s | >= 9 | yes |" in text
    assert "shoal bench load" in text


def test_bars_are_as_long_as_their_figures():
    rows = [Row(metric=f"first token, p{n}", value=float(n), unit="ms") for n in (50, 100)]
    (drawing,) = plots.of(report(*rows, Row(metric="alone", value=1.0)))
    lines = [line for line in shown(drawing).splitlines() if "█" in line]
    assert [line.count("█") for line in lines] == [15, 30]


def test_bars_show_our_figure_once_beside_two_peers():
    rows = [
        Row(metric=f"output, {n} streams", value=9.0 * n, unit="tok/s", peer=peer, peer_value=8.0 * n)
        for n in (1, 8)
        for peer in ("one", "two")
    ]
    (drawing,) = plots.of(report(*rows))
    lines = [line for line in shown(drawing).splitlines() if "tok/s" in line]
    assert [line.partition("█")[0].strip() for line in lines if "shoal" in line] == [
        "1 streams, shoal",
        "8 streams, shoal",
    ]
    assert len(lines) == 6


def test_the_machine_is_read_from_what_the_system_tells():
    cpuinfo = "model name\t: AMD EPYC\nflags\t\t: fpu avx2 sse\n\nmodel name\t: AMD EPYC\n"
    assert machine.cpu_name(cpuinfo) == "AMD EPYC"
    assert machine.vectors(cpuinfo) == "avx2"
    assert machine.vectors("") == "none known"
    assert machine.system_name('NAME="x"\nPRETTY_NAME="Debian 12"\n') == "Debian 12"
    assert machine.words(machine.describe())
    assert machine.software()["python"]
