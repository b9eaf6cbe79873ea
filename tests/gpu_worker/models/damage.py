"""What the tests of damaged checkpoints share: ways to break bytes, and what must come of it."""

import resource
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from gpu_worker.models.errors import LoadError
from gpu_worker.models.registry import LoadedModel, load
from mesh.models import ModelFolder

# Loading the whole small file takes some ten milliseconds and no memory to speak of.
MOST_S = 5
MOST_KIB = 256 << 10

EXAMPLES = 300

fuzzed = settings(
    max_examples=EXAMPLES,
    deadline=MOST_S * 1000,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    database=None,
)


def load_folder(path: Path) -> LoadedModel:
    return load(ModelFolder("m", path), torch.device("cpu"), "fp32", lambda fraction, what: None)


@contextmanager
def little_memory() -> Iterator[None]:
    """The process's peak grows by less than MOST_KIB inside."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_KIB


def loads_or_is_refused(path: Path) -> LoadError | None:
    """The refusal, if there is one; anything but a model or a LoadError that names a file of the folder fails."""
    refusal: LoadError | None = None
    with little_memory():
        try:
            assert load_folder(path).decoder.vocab_size > 0
        except LoadError as error:
            refusal = error
    if refusal is not None:
        assert path in (refusal.file, refusal.file.parent)
        assert str(refusal).startswith(str(refusal.file))
        assert str(refusal).isprintable(), "not one line"
        assert len(str(refusal)) < 1500
    return refusal


def with_bytes(content: bytes, at: int, new: bytes) -> bytes:
    return content[:at] + new + content[at + len(new) :]


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


ABSURD = [1 << 20, 1 << 31, 1 << 32, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]


@st.composite
def damages(draw: st.DrawFn, size: int, header: int) -> list[tuple[int, bytes]]:
    """Some overwritten places: single bits, bytes and whole numbers, mostly in the header."""
    at = st.one_of(st.integers(0, header - 1), st.integers(0, header - 1), st.integers(0, size - 1))
    new = st.one_of(st.binary(min_size=1, max_size=1), st.sampled_from([u64(v) for v in (0, 1, *ABSURD)]))
    return draw(st.lists(st.tuples(at, new), min_size=1, max_size=3))
