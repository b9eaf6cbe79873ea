"""Whatever happened to a GGUF file: it loads, or it is refused by file and tensor. Never a hang or gigabytes."""

import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.models.dequantize import Dequantizer
from gpu_worker.models.errors import LoadError

from .damage import ABSURD, damages, fuzzed, loads_or_is_refused, u32, u64, with_bytes


class Gguf:
    """A small valid file, and where things lie in it."""

    def __init__(self, path: Path) -> None:
        self.content = path.read_bytes()
        reader = gguf.GGUFReader(path)
        self.data_at = reader.data_offset
        self.fields = {name: field.offset for name, field in reader.fields.items()}
        self.tensors = {tensor.name: tensor.field for tensor in reader.tensors}
        self.ends = sorted(tensor.data_offset + tensor.n_bytes for tensor in reader.tensors)
        self.starts = sorted(tensor.data_offset for tensor in reader.tensors)

    def behind_key(self, key: str) -> int:
        """Where the type of a metadata entry stands; its value follows four bytes later."""
        return self.fields[key] + 8 + len(key)

    def tensor_parts(self, name: str) -> dict[str, int]:
        """Where the parts of a tensor's info stand."""
        at = self.tensors[name].offset + 8 + len(name)
        dimensions = int(self.tensors[name].parts[2][0])
        names = ["dimensions", *(f"size{i}" for i in range(dimensions)), "kind", "offset"]
        sizes = [4, *(8 for _ in range(dimensions)), 4, 8]
        return {part: at + sum(sizes[:i]) for i, part in enumerate(names)}


@pytest.fixture(scope="module")
def sound(bench, tmp_path_factory) -> Gguf:
    path = tmp_path_factory.mktemp("sound") / "model.gguf"
    bench.write_gguf(bench.random_llama(), path)
    return Gguf(path)


@pytest.fixture
def refused(tmp_path, sound) -> Callable[[bytes], LoadError]:
    """`refused(content)`: the LoadError that a GGUF file of this content gives."""

    def load_it(content: bytes) -> LoadError:
        (tmp_path / "model.gguf").write_bytes(content)
        error = loads_or_is_refused(tmp_path)
        assert error is not None, "it was loaded"
        return error

    return load_it


def test_a_gguf_file_that_ends_anywhere_is_refused(sound, refused):
    within_header = range(0, sound.data_at, 7)
    around_tensors = {at + shift for at in (*sound.starts, *sound.ends) for shift in (-1, 0, 1)}
    for size in sorted({*within_header, *around_tensors}):
        if size < sound.ends[-1]:
            error = refused(sound.content[:size])
            assert "fetch it again" in str(error), size


def test_a_file_that_is_no_gguf_is_refused_by_what_it_begins_with(sound, refused):
    assert "begins with b'FUGG'" in str(refused(with_bytes(sound.content, 0, b"FUGG")))
    for version in (0, 1, 4, 3 << 24):  # the last: big-endian
        assert f"version is {version}" in str(refused(with_bytes(sound.content, 4, u32(version))))


@pytest.mark.parametrize("value", ABSURD)
def test_absurd_counts_and_lengths_are_refused_before_anything_is_made_of_them(sound, refused, value):
    key = "tokenizer.ggml.tokens"
    name = next(iter(sound.tensors))
    places = {
        "tensors": 8,
        "metadata entries": 16,
        "a key of its metadata": sound.fields["llama.block_count"],
        f"strings in {key}": sound.behind_key(key) + 8,
        f"within {key}": sound.behind_key(key) + 16,  # the length of the first string
        "a tensor's name": sound.tensors[name].offset,
        f"tensor {name}": sound.tensor_parts(name)["size0"],
    }
    for what, at in places.items():
        assert what in str(refused(with_bytes(sound.content, at, u64(value))))


@pytest.mark.parametrize(
    ("part", "new", "words"),
    [
        ("dimensions", u32(0), "0 dimensions"),
        ("dimensions", u32(5), "5 dimensions"),
        ("dimensions", u32((1 << 32) - 1), "dimensions"),
        ("size0", u64(0), "no whole blocks"),
        ("kind", u32(4), "unknown type 4"),
        ("kind", u32(8), "no whole blocks of 32"),
        ("offset", u64(1 << 50), "but the file at"),
        ("offset", u64(1), "no multiple of 32"),
    ],
)
def test_a_tensor_that_cannot_be_where_or_what_it_claims_is_named(sound, refused, part, new, words):
    name = "blk.1.ffn_down.weight"
    error = str(refused(with_bytes(sound.content, sound.tensor_parts(name)[part], new)))
    assert words in error
    assert name in error


def test_tensors_over_each_other_are_refused(sound, refused):
    first, second = "blk.0.ffn_up.weight", "blk.0.ffn_gate.weight"
    one, other = (sound.tensor_parts(name)["offset"] for name in (first, second))
    assert "within the one before it" in str(refused(with_bytes(sound.content, one, sound.content[other : other + 8])))


@pytest.mark.parametrize(
    ("key", "kind", "value", "words"),
    [
        ("llama.block_count", 4, u32(3), "missing; expected shape"),
        ("llama.block_count", 4, u32(1), "no place in the configuration"),
        ("llama.block_count", 4, u32(0), "expected a whole number above 0"),
        ("llama.block_count", 6, struct.pack("<f", 2.0), "metadata llama.block_count is 2.0"),
        ("llama.block_count", 99, u32(2), "llama.block_count has the unknown type 99"),
        ("llama.embedding_length", 4, u32(64), "the configuration expects [61, 64]"),
        ("llama.attention.head_count", 4, u32(14), "do not divide into 14 heads"),
        ("llama.attention.head_count", 4, u32((1 << 32) - 1), "num_attention_heads"),
        ("llama.attention.head_count_kv", 4, u32(3), "3"),
        ("llama.feed_forward_length", 4, u32(41), "the configuration expects [41, 32]"),
        ("llama.rope.freq_base", 6, struct.pack("<f", float("nan")), "rope_theta is nan"),
        ("llama.attention.layer_norm_rms_epsilon", 6, struct.pack("<f", -1.0), "rms_norm_eps is -1.0"),
        ("tokenizer.ggml.eos_token_id", 6, struct.pack("<f", 2.0), "expected a token id"),
    ],
)
def test_metadata_that_contradicts_the_tensors_or_no_model_can_have_is_named(sound, refused, key, kind, value, words):
    at = sound.behind_key(key)
    assert words in str(refused(with_bytes(sound.content, at, u32(kind) + value)))


def test_a_lost_key_and_an_unknown_architecture_are_named(sound, refused):
    for key in ("llama.embedding_length", "general.architecture"):
        lost = with_bytes(sound.content, sound.fields[key] + 8, key.upper().encode())
        assert f"metadata lacks {key}" in str(refused(lost))
    at = sound.behind_key("general.architecture") + 4 + 8
    assert "unknown architecture 'mamba'" in str(refused(with_bytes(sound.content, at, b"mamba")))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_no_number_is_refused_by_its_tensor(sound, refused, value):
    for end in (sound.ends[0], sound.ends[-1]):
        error = refused(with_bytes(sound.content, end - 4, struct.pack("<f", value)))
        assert "not finite numbers" in str(error)
        assert error.tensor is not None


def test_a_quantized_type_that_the_library_does_not_know_is_refused_by_its_tensor(bench, tmp_path):
    class Odd(gguf.GGUFWriter):
        def add_tensor(self, name, tensor, **options):
            if "ffn_up" in name:
                options["raw_dtype"] = gguf.GGMLQuantizationType.I32
            super().add_tensor(name, tensor, **options)

    bench.write_gguf(bench.random_llama(), tmp_path / "model.gguf", Odd)
    error = loads_or_is_refused(tmp_path)
    assert "type I32" in str(error)
    assert error.tensor == "model.layers.0.mlp.up_proj.weight"


@fuzzed
@given(data=st.data())
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy tells of weights that have become absurd
def test_a_gguf_file_with_any_damage_loads_or_is_refused(sound, tmp_path, data):
    content = sound.content
    for at, new in data.draw(damages(len(content), sound.data_at)):
        content = with_bytes(content, at, new)
    cut = data.draw(st.one_of(st.just(len(content)), st.just(len(content)), st.integers(0, len(content))))
    (tmp_path / "model.gguf").write_bytes(content[:cut])
    loads_or_is_refused(tmp_path)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "F16", "F32"])
def test_every_type_is_dequantized_as_by_the_library_itself(kind):
    kind = gguf.GGMLQuantizationType[kind]
    weights = np.random.default_rng(0).standard_normal((700, 640), np.float32)
    rows = gguf.quantize(weights, kind).view(np.uint8)
    ours = Dequantizer().fp32(rows, kind)
    assert np.array_equal(ours, gguf.dequantize(rows, kind))
    assert ours.flags.writeable
