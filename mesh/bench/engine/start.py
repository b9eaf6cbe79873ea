"""From a process's start to its first token, beside reading the model's file: both from a disk that must be read.

What is started is the engine as a worker starts it (interpreter, libraries, weights, pool, one answer), without the
worker around it. Before each measurement the kernel is asked to forget the model's files; Python's and torch's own stay
in the page cache.
"""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from mesh import models
from mesh.bench import measurer, tuning
from mesh.bench.engine.plan import EnginePlan, Found
from mesh.bench.progress import bar
from mesh.bench.report import CannotMeasure, Goal, Row

READ_TIMES, WARM_UP_S = 1.5, 5.0  # the goal: so many times reading the file, and so much more
PIECE_BYTES = 1 << 20
WEIGHTS = ("*.gguf", "*.safetensors")


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds."""

    read_s: float
    first_token_s: float


def measure(plan: EnginePlan) -> Found:
    """Raises CannotMeasure if the engine does not start."""
    env = plan.tuning.env()
    tuning.effective(plan.model, env)
    files = _weights(models.folder_of(plan.model).path)
    precision, found = "", []
    with bar("starting engines", plan.rounds + 1) as shown:
        for number in range(-1, plan.rounds):  # the first may build kernels
            _forget(files)
            read_s = _read_s(files)
            _forget(files)
            began = time.perf_counter()
            told = measurer.run("start", {"SHOAL_MODEL": plan.model, **env, "SHOAL_WORKER_KIND": plan.engine})
            if number >= 0:
                found.append(Start(read_s, time.perf_counter() - began))
            precision = told["precision"]
            shown.advance()
    return Found([*rows(found, sum(file.stat().st_size for file in files))], {"precision of the start": precision})


def rows(starts: list[Start], size_bytes: int) -> Iterator[Row]:
    """The file's reading, and the start with a goal that follows from it."""
    read_s = median(start.read_s for start in starts)
    yield Row(metric=f"reading the model's file, {size_bytes / 1e6:.0f} MB", value=read_s, unit="s")
    yield Row(
        metric="process to first token",
        value=median(start.first_token_s for start in starts),
        unit="s",
        goal=Goal("<=", READ_TIMES * read_s + WARM_UP_S),
        note=f"the goal is {READ_TIMES:g} times reading the file and {WARM_UP_S:g} s; libraries were in the page cache",
    )


def _weights(folder: Path) -> list[Path]:
    files = [file.resolve() for pattern in WEIGHTS for file in sorted(folder.glob(pattern))]
    if not files:
        raise CannotMeasure(f"{folder} holds no weights")
    return files


def _forget(files: list[Path]) -> None:
    """Drop their pages from the kernel's cache."""
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        try:
            os.fsync(handle)  # pages that are not yet written cannot be dropped
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def _read_s(files: list[Path]) -> float:
    began = time.perf_counter()
    for file in files:
        with file.open("rb", buffering=0) as handle:
            while handle.read(PIECE_BYTES):
                pass
    return time.perf_counter() - began
