"""Fetches one wheel with this environment's pip, and tells how far it is.

pip is asked rather than an index, so that a user's mirrors, proxies and certificates count. Its progress output
differs by version; the growing file under its temporary folder does not, so that is what the bar follows.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from mesh.cli.problem import Problem

REFRESH_S = 0.1  # how often the bar moves
NETWORK_TIMEOUT_S = 30  # pip gives a silent server up after this
STOP_GRACE_S = 5


def download_wheel(requirement: str, into: Path, on_bytes: Callable[[int], None]) -> Path:
    """Download `requirement` into `into`, calling `on_bytes(bytes so far)`. Returns the wheel's path.

    Raises Problem with pip's own words when it fails. Stopping early stops pip.
    """
    into.mkdir(exist_ok=True)
    log = into / "pip.log"
    with log.open("wb") as output:
        pip = subprocess.Popen(
            _command(requirement, into), stdout=output, stderr=subprocess.STDOUT, env=os.environ | {"TMPDIR": str(into)}
        )
        try:
            _follow(pip, into, on_bytes)
        finally:
            _stop(pip)
    wheels = sorted(into.glob("*.whl"))
    if pip.returncode != 0 or not wheels:
        raise Problem(f"could not download {requirement}: {_last_words(log)}", "check the network and pip's settings")
    return wheels[0]


def _command(requirement: str, into: Path) -> list[str]:
    options = "--no-deps --only-binary=:all: --progress-bar=off --no-input --disable-pip-version-check --no-cache-dir"
    patience = [f"--timeout={NETWORK_TIMEOUT_S}", "--retries=2"]
    return [sys.executable, "-m", "pip", "download", *options.split(), *patience, f"--dest={into}", requirement]


def _follow(pip: "subprocess.Popen[bytes]", folder: Path, on_bytes: Callable[[int], None]) -> None:
    while True:
        try:
            pip.wait(timeout=REFRESH_S)
        except subprocess.TimeoutExpired:
            on_bytes(_largest_file(folder))
            continue
        return


def _largest_file(folder: Path) -> int:
    """Bytes. pip may move or remove a file while we look, so one that is gone counts as nothing."""
    sizes = [0]
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append(os.stat(os.path.join(parent, name)).st_size)
            except FileNotFoundError:
                continue
    return max(sizes)


def _stop(pip: "subprocess.Popen[bytes]") -> None:
    if pip.poll() is not None:
        return
    pip.terminate()
    try:
        pip.wait(timeout=STOP_GRACE_S)
    except subprocess.TimeoutExpired:
        pip.kill()
        pip.wait()


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["pip said nothing"])[-1]
