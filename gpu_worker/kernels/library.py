"""The kernels' shared library: built once per machine with whatever compiler there is, then found again.

It is compiled for this very processor (`-march=native`), so its name carries a digest of the sources, the compiler's
version and the processor's features. A machine without a compiler, or of another architecture, has no library; the
engine then computes with torch alone, and says so.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from mesh.models import cache_dir

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "cpu"
FLAGS = [
    *("-O3", "-std=c++17", "-march=native", "-shared", "-fPIC", "-pthread", "-fvisibility=hidden"),
    *("-ffp-contract=on", "-fno-math-errno", "-Wno-psabi", "-Wno-uninitialized", "-Wno-maybe-uninitialized"),
]
COMPILE_TIMEOUT_S = 300
# Without these no kernel here can be compiled.
NEEDED_FEATURES = {"avx2", "fma", "f16c"}


class NoKernels(Exception):
    """There is no library for this machine; the message says why and what would help."""


@cache
def library() -> ctypes.CDLL:
    """The loaded library. Raises NoKernels."""
    return ctypes.CDLL(str(built()))


def built() -> Path:
    """The library's file, compiled if it is not there yet. Raises NoKernels."""
    features = processor_features()
    if platform.machine() != "x86_64" or not features >= NEEDED_FEATURES:
        lacking = ", ".join(sorted(NEEDED_FEATURES - features)) or platform.machine()
        raise NoKernels(f"the CPU kernels need x86-64 with AVX2, FMA and F16C (here: {lacking})")
    compiler = next(compilers(), None)
    if compiler is None:
        raise NoKernels("no C++ compiler was found: install g++ or clang++, or `pip install ziglang`, or set CXX")
    file = cache_dir() / "kernels" / f"shoal-{_digest(compiler, features)}.so"
    if not file.is_file():
        _compile(compiler, file)
    return file


def compilers() -> Iterator[list[str]]:
    """Commands that may compile C++, the likeliest first."""
    if "CXX" in os.environ:
        yield os.environ["CXX"].split()
    for name in ("g++", "c++", "clang++"):
        if (found := shutil.which(name)) is not None:
            yield [found]
    if subprocess.run([sys.executable, "-c", "import ziglang"], capture_output=True, check=False).returncode == 0:
        yield [sys.executable, "-m", "ziglang", "c++"]


def processor_features() -> set[str]:
    """The features that the system names for the first processor; empty where it does not tell."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return set(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), []))


def _digest(compiler: list[str], features: set[str]) -> str:
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=False).stdout
    digest = hashlib.blake2b(version, digest_size=12)
    for text in (*compiler, *FLAGS, *sorted(features)):
        digest.update(text.encode() + b"\0")
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def _compile(compiler: list[str], file: Path) -> None:
    """Compile into `file`, whole or not at all: several workers may start at once."""
    log.info("compiling the CPU kernels (once on this machine)")
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}")
    command = [*compiler, *FLAGS, str(SOURCES / "program.cpp"), "-o", str(part)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
        if done.returncode:
            raise NoKernels(f"{compiler[0]} could not compile the CPU kernels: {_first_error(done.stderr)}")
        part.replace(file)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoKernels(f"{compiler[0]} could not compile the CPU kernels: {error}") from error
    finally:
        part.unlink(missing_ok=True)


def _first_error(text: str) -> str:
    lines = text.splitlines() or ["it said nothing"]
    return next((line for line in lines if "error" in line), lines[0])
