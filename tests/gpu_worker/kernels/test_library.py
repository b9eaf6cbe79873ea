"""Where the kernels come from: compiled here, built beforehand, or not at all."""

import subprocess
import sys
from pathlib import Path

import pytest

from gpu_worker.kernels import library
from gpu_worker.kernels.library import KINDS, NoKernels, built, compile_into, compilers, flags_for


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_built_for_a_kind_of_processor_pass_the_same_tests(tmp_path, kind):
    """With AVX2 alone as well: most machines have no more."""
    if not library.processor_features() >= KINDS[kind]:
        pytest.skip(f"this processor is no {kind}")
    compile_into(tmp_path / "kernels.so", next(compilers()), flags_for(KINDS[kind]))
    code = (
        "import ctypes, sys, pytest, gpu_worker.kernels.program as program\n"
        f"program.library = lambda: ctypes.CDLL({str(tmp_path / 'kernels.so')!r})\n"
        f"assert ('avx512' in program.instructions()) == ({kind!r} == 'avx512')\n"
        "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', sys.argv[1]]))\n"
    )
    tests = Path(__file__).with_name("test_program.py")
    done = subprocess.run([sys.executable, "-c", code, str(tests)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]


def test_a_library_is_compiled_once(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = built()
    when = first.stat().st_mtime_ns
    assert built() == first
    assert first.stat().st_mtime_ns == when
    assert [file.name for file in first.parent.iterdir()] == [first.name]


def test_sources_that_do_not_compile_are_told_and_leave_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(library, "SOURCES", tmp_path)
    (tmp_path / "kernels.cpp").write_text("int f() { return nonsense; }")
    target = tmp_path / "made" / "kernels.so"
    with pytest.raises(NoKernels, match="nonsense"):
        compile_into(target, next(compilers()), [])
    assert list(target.parent.iterdir()) == []


def test_a_machine_without_a_compiler_takes_what_was_built_beforehand(no_compiler):
    with pytest.raises(NoKernels, match=r"install g\+\+"):
        built()
    for kind in KINDS:
        (no_compiler / f"shoal-{kind}.so").touch()
    features = library.processor_features()
    ablest = next(kind for kind, needed in KINDS.items() if features >= needed)
    assert built() == no_compiler / f"shoal-{ablest}.so"
