"""How loading is shown."""

import logging

import pytest

from gpu_worker.loading import LoadingLine


def test_a_log_gets_a_line_every_tenth_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    line = LoadingLine(terminal=False)
    with caplog.at_level(logging.INFO, "shoal.loading"):
        for percent in range(101):
            line.show(percent / 100, "reading")
    assert [record.getMessage() for record in caplog.records] == [
        f"loading: {at} %, reading" for at in range(0, 101, 10)
    ]


def test_a_terminal_gets_one_line_that_fills(capsys: pytest.CaptureFixture[str]) -> None:
    line = LoadingLine(terminal=True)
    for percent in (0, 50, 100):
        line.show(percent / 100, "reading")
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert "100% reading\n" in shown


def test_a_line_that_did_not_fill_is_ended_once(capsys: pytest.CaptureFixture[str]) -> None:
    line = LoadingLine(terminal=True)
    line.show(0.4, "reading")
    line.end()
    line.end()
    assert capsys.readouterr().err.endswith(" 40% reading\n")
