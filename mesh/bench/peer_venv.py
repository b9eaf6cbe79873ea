"""A virtual environment of a peer's own, under the cache folder: made once, with pip, with its progress shown."""

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from mesh.bench.local_mesh import stop
from mesh.bench.progress import Bar, bar
from mesh.bench.report import CannotMeasure
from mesh.child import end_with_parent
from mesh.models import cache_dir

INSTALL_TIMEOUT_S = 3600.0
ASK_TIMEOUT_S = 60.0
LOOK_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class PeerVenv:
    """Where a peer is installed. `requirement` is exact, "name==version"."""

    name: str
    requirement: str

    @property
    def folder(self) -> Path:
        return cache_dir() / "peers" / self.name

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def site(self) -> Path:
        """Its site-packages."""
        return next((self.folder / "lib").glob("python3*/site-packages"))

    def is_installed(self) -> bool:
        distribution, _, version = self.requirement.partition("==")
        if not self.python.is_file():
            return False
        ask = f"import importlib.metadata as m; print(m.version({distribution!r}))"
        ran = subprocess.run([self.python, "-c", ask], capture_output=True, text=True, timeout=ASK_TIMEOUT_S)
        return ran.returncode == 0 and ran.stdout.strip() == version

    def install(self) -> None:
        """Make it what it should be. Raises CannotMeasure with pip's last words."""
        if self.is_installed():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with bar(f"installing {self.requirement}", None) as shown:
            self._run(shown, [sys.executable, "-m", "venv", str(self.folder)])
            self.pip(shown, "install", "--progress-bar=off", "--no-compile", self.requirement)

    def pip(self, shown: Bar, *arguments: str) -> None:
        options = ("--disable-pip-version-check", "--no-input")
        self._run(shown, [str(self.python), "-m", "pip", *arguments, *options])

    def _run(self, shown: Bar, command: list[str]) -> None:
        log = self.folder / "install.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
                preexec_fn=end_with_parent,
            )
        deadline = time.monotonic() + INSTALL_TIMEOUT_S
        try:
            while process.poll() is None and time.monotonic() < deadline:
                shown.say(f"installing {self.requirement}: {_last_line(log)[:60]}")
                time.sleep(LOOK_EVERY_S)
        finally:
            ended = process.poll() is not None
            stop(process, 5)
        if process.returncode != 0:
            how = "" if ended else f" within {INSTALL_TIMEOUT_S:g} s"
            raise CannotMeasure(f"{self.requirement} could not be installed{how}: {_last_line(log)} (all of it: {log})")


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else ""
