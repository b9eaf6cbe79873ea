"""`shoal pull org/name` with the real huggingface_hub client against a small hub on loopback."""

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from mesh.cli.problem import Problem
from mesh.cli.pull import pull

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b'{"version": "1.0"}',
    "tokenizer_config.json": b'{"eos_token": "</s>"}',
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"pickled code",
    "modeling.py": b"import os",
}


HELD = ("/api/models/org/small", "/org/small", "/api/models/other/small", "/other/small")


class SmallHub(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = dict(FILES)
        self.status = 200
        self.fetched: list[str] = []


class _Handler(BaseHTTPRequestHandler):
    """The two endpoints that a snapshot needs: the list of files, and each file with its ETag."""

    server: SmallHub

    def do_GET(self) -> None:
        hub = self.server
        if hub.status != 200 or not self.path.startswith(HELD):
            return self._send(b'{"error": "Repository not found"}', hub.status if hub.status != 200 else 404)
        if "/resolve/" in self.path:
            name = self.path.rpartition("/")[2]
            if self.command == "GET":
                hub.fetched.append(name)
            return self._send(hub.files[name])
        if "/tree/" in self.path:
            tree = [{"type": "file", "path": n, "size": len(b), "oid": etag(b)} for n, b in hub.files.items()]
            return self._send(json.dumps(tree).encode())
        listing = {"id": "org/small", "sha": COMMIT, "siblings": [{"rfilename": name} for name in hub.files]}
        return self._send(json.dumps(listing).encode())

    do_HEAD = do_GET

    def _send(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{etag(body)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        if status == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        if status == 403:
            self.send_header("X-Error-Code", "GatedRepo")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Silent."""


def etag(body: bytes) -> str:
    return hashlib.sha1(body).hexdigest()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallHub]:
    with SmallHub() as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_repository_gives_weights_tokenizer_and_configuration_and_nothing_that_runs(hub, home):
    folder = pull("org/small")
    assert folder.name == "small"
    assert sorted(path.name for path in folder.path.iterdir()) == [
        ".source",
        "chat_template.jinja",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert (folder.path / "model.safetensors").read_bytes() == b"weights"
    assert json.loads(folder.tokenizer_config.read_text()) == {"eos_token": "</s>", "chat_template": "{{ messages }}"}


def test_pulling_a_repository_again_fetches_nothing_unless_forced(hub, home):
    pull("org/small")
    before = len(hub.fetched)
    assert before
    pull("org/small")
    assert len(hub.fetched) == before
    pull("org/small", force=True)
    assert len(hub.fetched) == 2 * before


@pytest.mark.parametrize("force", [False, True])
def test_a_name_that_was_pulled_from_another_repository_is_refused_and_kept(hub, home, force):
    folder = pull("org/small/")
    hub.files["model.safetensors"] = b"other weights"
    with pytest.raises(Problem, match="pulled from org/small, not from other/small"):
        pull("other/small", force=force)
    assert (folder.path / "model.safetensors").read_bytes() == b"weights"


def test_a_repository_never_takes_the_name_of_a_model_of_the_catalogue(hub, home):
    with pytest.raises(Problem, match="means the catalogue's model"):
        pull("other/smollm2-135m")
    assert not hub.fetched


@pytest.mark.parametrize("missing", ["tokenizer.json", "model.safetensors", "config.json"])
def test_a_repository_without_a_needed_file_is_refused_and_leaves_nothing(hub, home, missing):
    del hub.files[missing]
    with pytest.raises(Problem, match="lacks one of"):
        pull("org/small")
    assert [path.name for path in (home / "models").iterdir()] == [".lock"]


@pytest.mark.parametrize(
    ("name", "status", "words"),
    [
        ("org/absent", 200, "no repository org/absent"),
        ("org/small", 403, "wants its terms accepted"),
        ("org/small", 500, "did not answer"),
        ("not a/valid name!", 200, "no repository"),
    ],
)
def test_what_the_hub_refuses_is_said_in_words(hub, home, name, status, words):
    hub.status = status
    with pytest.raises(Problem, match=words):
        pull(name)
    assert [path.name for path in (home / "models").iterdir()] == [".lock"]


def test_an_unreachable_hub_is_said(home, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(Problem, match="did not answer") as caught:
        pull("org/small")
    assert "network" in caught.value.advice
