"""The command line as a whole: instant help, and problems told in words."""

import subprocess
import sys
from importlib.metadata import version

import pytest

HEAVY = {
    "grpc",
    "httptools",
    "uvloop",
    "torch",
    "numpy",
    "rich",
    "tokenizers",
    "gguf",
    "huggingface_hub",
    "httpx",
    "psutil",
    "pydantic",
}


def shoal(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "mesh.cli.main", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_help_imports_nothing_heavy():
    probe = "import sys, mesh.cli.main; print(*(name for name in sys.modules if '.' not in name))"
    ran = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=True)
    loaded = set(ran.stdout.split())
    assert "typer" in loaded
    assert loaded & HEAVY == set()


def test_help_names_every_command():
    ran = shoal("--help")
    assert ran.returncode == 0
    for name in ("up", "down", "status", "chat", "pull", "doctor", "bench"):
        assert f"\n  {name} " in ran.stdout


def test_a_problem_is_told_on_stderr_with_what_to_do_and_exit_code_1():
    ran = shoal("pull", "nothing-like-it")
    assert ran.returncode == 1
    assert ran.stdout == ""
    assert ran.stderr.splitlines() == [
        "shoal: no model is called 'nothing-like-it'",
        "       known names: smollm2-135m. A Hugging Face repository is fetched with `shoal pull org/name`.",
    ]


def test_a_wrong_option_is_a_usage_error():
    ran = shoal("chat", "--temprature", "1")
    assert ran.returncode == 2
    assert "--temperature" in ran.stderr


def test_the_version_is_that_of_the_distribution():
    ran = shoal("--version")
    assert (ran.returncode, ran.stdout) == (0, f"shoal {version('shoal')}\n")


@pytest.mark.parametrize("option", ["--http-port", "--grpc-port"])
@pytest.mark.parametrize("port", ["0", "65536"])
def test_a_port_out_of_range_is_a_usage_error_before_anything_is_pulled(home, option, port):
    ran = shoal("up", option, port)
    assert ran.returncode == 2
    assert option in ran.stderr
    assert not home.exists()


def test_up_names_the_pull_that_a_repository_wants(home):
    ran = shoal("up", "--model", "org/nope")
    assert ran.returncode == 1
    assert ran.stderr.startswith("shoal: org/nope is not pulled")
    assert "`shoal pull org/nope`" in ran.stderr
    assert "Traceback" not in ran.stderr
