"""The kernels' shared library: built once per machine with whatever compiler there is, then found again.

It is compiled for this very processor (`-march=native`), so its name carries a digest of the sources, the compiler's
version and the processor's features. Where there is no compiler, one of the libraries is taken that were built for
kinds of processors beforehand (`python -m gpu_worker.kernels FOLDER`, as the image does). With neither, or on another
architecture, the engine computes with torch alone, and says so.
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
from functools import lru_cache
from pathlib import Path

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "cpu"
FLAGS = [
    *("-O3", "-std=c++17", "-shared", "-fPIC", "-pthread", "-fvisibility=hidden", "-ffp-contract=on"),
    *("-fno-math-errno", "-w"),
]
COMPILE_TIMEOUT_S = 300
# Kinds of processors, the ablest first, by the features that the system must name.
_AVX2 = {"avx2", "fma", "f16c", "bmi2"}
_AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16"}
KINDS = {"avx512": _AVX2 | _AVX512, "avx2": _AVX2}
NO_COMPILER = "no C++ compiler was found: install g++ or clang++, or `pip install ziglang`, or set CXX"
PREBUILT = Path(__file__).parent / "built"


class NoKernels(Exception):
    """There is no library for this machine; the message says why and what would help."""


@lru_cache(1)
def library() -> ctypes.CDLL:
    """The loaded library. Raises NoKernels."""
    return ctypes.CDLL(str(built()))


def built() -> Path:
    """The library's file, compiled if it is not there yet. Raises NoKernels."""
    features = processor_features()
    if platform.machine() != "x86_64" or not features >= _AVX2:
        lacking = ", ".join(sorted(_AVX2 - features)) or platform.machine()
        raise NoKernels(f"the CPU kernels need x86-64 with AVX2, FMA and F16C (here: {lacking})")
    compiler = next(compilers(), None)
    if compiler is None:
        return _prebuilt(features)
    file = cache() / f"shoal-{_digest(compiler, features)}.so"
    if not file.is_file():
        log.info("compiling the CPU kernels (once on this machine)")
        compile_into(file, compiler, ["-march=native"])
    return file


def cache() -> Path:
    """Where libraries are kept: with the user, whatever SHOAL_HOME is, for they are the machine's."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shoal" / "kernels"


def _prebuilt(features: set[str]) -> Path:
    for kind, needed in KINDS.items():
        file = PREBUILT / f"shoal-{kind}.so"
        if file.is_file() and features >= needed:
            return file
    raise NoKernels(NO_COMPILER)


def compilers() -> Iterator[list[str]]:
    """Commands that may compile C++, the likeliest first."""
    if "CXX" in os.environ:
        yield os.environ["CXX"].split()
    for name in ("g++", "c++", "clang++"):
        if (found := shutil.which(name)) is not None:
            yield [found]
    if subprocess.run([sys.executable, "-c", "import ziglang"], capture_output=True, check=False).returncode == 0:
        yield [sys.executable, "-m", "ziglang", "c++"]


def flags_for(features: set[str]) -> list[str]:
    """What lets a compiler use them. Not a name for the kind, which compilers spell differently."""
    return [f"-m{feature.replace('_', '')}" for feature in sorted(features)]


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


def compile_into(file: Path, compiler: list[str], flags: list[str]) -> None:
    """Compile into `file`, whole or not at all: several workers may start at once. Raises NoKernels."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}")
    command = [*compiler, *FLAGS, *flags, str(SOURCES / "kernels.cpp"), "-o", str(part)]
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
