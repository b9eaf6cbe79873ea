"""Whatever happened to a safetensors folder: it loads, or it is refused by file and tensor. Never another error."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from .damage import ABSURD, damages, fuzzed, loads_or_is_refused, with_bytes


@pytest.fixture
def folder(saved) -> Path:
    """A sharded safetensors folder with all that is read of it."""
    path = saved(shard="8KB", eos_token_id=3)
    (path / "generation_config.json").write_text('{"eos_token_id": [7]}')
    (path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<end>"}}')
    (path / "tokenizer.json").write_text('{"added_tokens": [{"id": 11, "content": "x"}], "model": {"vocab": {"a": 1}}}')
    return path


@fuzzed
@given(data=st.data())
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_safetensors_folder_with_any_damage_loads_or_is_refused(folder, data):
    file = data.draw(st.sampled_from(sorted(path for path in folder.iterdir() if path.is_file())))
    sound = file.read_bytes()
    content = sound
    for at, new in data.draw(damages(len(content), min(len(content), 2000))):
        content = with_bytes(content, at, new)
    try:
        file.write_bytes(content[: data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))])
        loads_or_is_refused(folder)
    finally:
        file.write_bytes(sound)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from([0, -1, *ABSURD]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=4,
)


@fuzzed
@given(data=st.data())
def test_a_configuration_with_any_value_anywhere_loads_or_is_refused(folder, data):
    names = ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"]
    file = folder / data.draw(st.sampled_from([*names, "model.safetensors.index.json"]))
    sound = file.read_text()
    content = json.loads(sound)
    place = content
    path = ["rope_parameters"] if file.name == "config.json" and data.draw(st.booleans()) else []
    for key in path:
        place = place[key]
    place[data.draw(st.sampled_from(sorted(place)))] = data.draw(ANYTHING)
    try:
        file.write_text(json.dumps(content))
        loads_or_is_refused(folder)
    finally:
        file.write_text(sound)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json"])
def test_a_file_of_ten_thousand_brackets_is_refused(folder, name):
    (folder / name).write_text("[" * 10_000)
    error = loads_or_is_refused(folder)
    assert error is not None
    assert error.file.name == name


def test_two_files_that_hold_one_tensor_and_no_index_are_refused(folder):
    index = folder / "model.safetensors.index.json"
    first = sorted(folder.glob("*.safetensors"))[0]
    index.unlink()
    (folder / "zz.safetensors").write_bytes(first.read_bytes())
    error = loads_or_is_refused(folder)
    assert error.tensor is not None
    assert "zz.safetensors" in str(error)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda index: index.pop("weight_map"), "weight_map is NoneType"),
        (lambda index: index.__setitem__("weight_map", []), "weight_map is list"),
        (lambda index: index["weight_map"].update({"model.norm.weight": 3}), "names 3"),
        (
            lambda index: index["weight_map"].update({"model.norm.weight": "../x.safetensors"}),
            "not a file of this folder",
        ),
        (lambda index: index["weight_map"].update({"model.norm.weight": "gone.safetensors"}), "gone.safetensors"),
        (
            lambda index: index["weight_map"].update({"model.norm.weight": "\0.safetensors"}),
            "not a file of this folder",
        ),
        (lambda index: index["weight_map"].update({"model.norm.weight": "\ud800.safetensors"}), "not a file"),
        (lambda index: index["weight_map"].update({"ghost\n": sorted(index["weight_map"].values())[0]}), "ghost"),
        (lambda index: index["weight_map"].pop("model.norm.weight"), "model.norm.weight: missing; expected shape [32]"),
    ],
)
def test_an_index_that_lies_is_refused(folder, change, words):
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    change(index)
    file.write_text(json.dumps(index))
    assert words in str(loads_or_is_refused(folder))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64])
def test_weights_of_a_type_that_is_no_plain_float_are_refused_by_tensor(saved, bench, dtype):
    path = saved()
    weights = {name: tensor.clone() for name, tensor in bench.random_llama().state_dict().items()}
    weights["model.norm.weight"] = weights["model.norm.weight"].to(dtype)
    save_file(weights, path / "model.safetensors")
    error = loads_or_is_refused(path)
    assert error.tensor == "model.norm.weight"
    assert str(dtype) in str(error)
