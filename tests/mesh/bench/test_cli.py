"""`shoal bench` as a command line: what its page promises exists, and what cannot be meant is refused at once."""

import re
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from mesh.cli import bench
from mesh.cli.main import app

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "benchmarks.md").read_text()
USES = [line.partition("#")[0].split() for line in PAGE.splitlines() if line.startswith("shoal bench ")]


@pytest.mark.parametrize("words", USES, ids=" ".join)
def test_a_command_of_the_page_has_its_options(words: list[str]) -> None:
    command = typer.main.get_command(bench.app).commands[words[2]]
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    assert {word for word in words if re.match("--", word)} <= known


def test_the_page_shows_every_benchmark() -> None:
    assert {words[2] for words in USES} == set(typer.main.get_command(bench.app).commands)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["load", "http://x", "--rate", "1", "--trace", "t.csv"], "--speedup"),
        (["peers", "--peers", "llama.cpp"], "llama.cpp"),
        (["peers", "--streams", "1,0"], "from 1 to 512"),
        (["peers", "--only", "first"], "first-token"),
        (["peers", "--precision", "int7"], "int8"),
        (["engine", "--only", "static,magic"], "magic"),
        (["engine", "--only", ","], "interference"),
        (["engine", "--only", "start", "--svg", "x.svg"], "curves"),
        (["gateway", "--peer", "other"], "vllm"),
        (["load", "--api", "images"], "completions"),
    ],
)
def test_what_cannot_be_meant_is_a_usage_error(arguments, said):
    ran = CliRunner().invoke(app, ["bench", *arguments])
    assert ran.exit_code == 2
    assert said in ran.output


def test_a_model_that_is_not_here_is_told_with_exit_code_2(monkeypatch, tmp_path):
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    ran = CliRunner().invoke(app, ["bench", "cold"])
    assert ran.exit_code == 2
    assert "shoal pull smollm2-135m" in ran.output


def test_without_a_url_a_mesh_must_run(monkeypatch, tmp_path):
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    ran = CliRunner().invoke(app, ["bench", "load"])
    assert ran.exit_code == 2
    assert "no mesh is running" in ran.output
