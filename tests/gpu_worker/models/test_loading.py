"""Checkpoints that are damaged or contradict themselves are refused by file and tensor; good ones say what they are."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_worker.models.errors import LoadError
from gpu_worker.models.registry import load
from mesh.models import ModelFolder


def loaded(path, progress=lambda fraction, what: None):
    return load(ModelFolder("m", path), torch.device("cpu"), "fp32", progress)


def edit_config(folder, **changes):
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def edit_weights(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "unknown architecture 'MambaForCausalLM'"),
        ({"hidden_size": 64}, "has shape"),
        ({"num_hidden_layers": 3}, "missing; expected shape"),
        ({"num_hidden_layers": 1}, "has no place in the configuration"),
        ({"num_key_value_heads": 3}, "cannot share"),
        ({"vocab_size": 60}, "expects [60, 32]"),
        ({"intermediate_size": None}, "lacks intermediate_size"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'; expected a number"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "missing; expected shape"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1.0}}, "unknown rope scaling 'spiral'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0}}, "rope scaling lacks factor"),
    ],
)
def test_a_configuration_that_contradicts_its_tensors_is_refused(saved, changes, words):
    folder = saved()
    edit_config(folder, **changes)
    with pytest.raises(LoadError) as raised:
        loaded(folder)
    assert words in str(raised.value)
    assert str(raised.value.file) in str(raised.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe"])
def test_a_configuration_that_is_no_object_is_refused(saved, content):
    folder = saved()
    (folder / "config.json").write_bytes(content)
    with pytest.raises(LoadError, match=r"config\.json"):
        loaded(folder)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_truncated_safetensors_file_is_refused(saved, share):
    file = saved() / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    with pytest.raises(LoadError, match=r"model\.safetensors"):
        loaded(file.parent)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.1, 0.5, 0.99])
def test_a_truncated_gguf_file_is_refused(bench, tmp_path, share):
    file = tmp_path / "model.gguf"
    bench.write_gguf(bench.random_llama(), file)
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    with pytest.raises(LoadError, match=r"model\.gguf"):
        loaded(tmp_path)


def test_a_tensor_of_the_wrong_kind_or_value_is_refused_by_name(saved):
    name = "model.layers.1.mlp.up_proj.weight"
    for change in (
        lambda tensors: tensors.__setitem__(name, tensors[name].to(torch.int8)),
        lambda tensors: tensors.__setitem__(name, tensors[name] * torch.nan),
        lambda tensors: tensors.__setitem__(name, tensors[name].T.contiguous()),
        lambda tensors: tensors.pop(name),
    ):
        folder = saved()
        edit_weights(folder, change)
        with pytest.raises(LoadError) as raised:
            loaded(folder)
        assert raised.value.tensor == name


def test_a_shard_that_is_missing_or_outside_the_folder_is_refused(saved):
    folder = saved(shard="8KB")
    first = sorted(folder.glob("*.safetensors"))[0]
    kept = first.read_bytes()
    first.unlink()
    with pytest.raises(LoadError, match=first.name):
        loaded(folder)
    first.write_bytes(kept)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(first.name, f"../{first.name}"))
    with pytest.raises(LoadError, match="not a file of this folder"):
        loaded(folder)


@pytest.mark.parametrize("count", [0, 2])
def test_a_folder_without_one_set_of_weights_is_refused(bench, tmp_path, count):
    for i in range(count):
        bench.write_gguf(bench.random_llama(), tmp_path / f"{i}.gguf")
    with pytest.raises(LoadError):
        loaded(tmp_path)


def test_the_digest_follows_the_content_and_not_the_place(saved, tmp_path_factory):
    folder = saved()
    copy = tmp_path_factory.mktemp("copy") / "other"
    shutil.copytree(folder, copy)
    assert loaded(copy).digest == loaded(folder).digest
    edit_weights(copy, lambda tensors: tensors["model.norm.weight"].add_(1e-3))
    changed = loaded(copy).digest
    edit_config(folder, rms_norm_eps=1e-3)
    assert len({changed, loaded(folder).digest, loaded(copy).digest}) == 2
    assert len(changed) == 32


def test_every_source_of_ending_tokens_counts(saved, bench, tmp_path_factory):
    folder = saved(eos_token_id=3)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9, 9999]}')
    (folder / "tokenizer_config.json").write_text('{"eos_token": {"content": "<end>"}}')
    (folder / "tokenizer.json").write_text('{"added_tokens": [{"id": 11, "content": "<end>"}], "model": {"vocab": {}}}')
    assert loaded(folder).eos_token_ids == (3, 7, 9, 11)
    other = tmp_path_factory.mktemp("gguf")
    bench.write_gguf(bench.random_llama(), other / "m.gguf")
    assert loaded(other).eos_token_ids == (2, 5)


def test_progress_runs_up_from_zero_and_names_tensors(saved):
    seen = []
    loaded(saved(), lambda fraction, what: seen.append((fraction, what)))
    fractions = [fraction for fraction, _ in seen]
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0.0, 0.9)
    assert any("mlp.gate_proj" in what for _, what in seen)
