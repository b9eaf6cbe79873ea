"""Where models live on disk, and what of a model folder both gateway and worker must agree on.

A model folder holds `tokenizer.json`, `tokenizer_config.json` (chat template, special tokens) and the weights, either
one `*.gguf` or `*.safetensors` with a `config.json`. A name without a slash means a folder under the cache, made by
`shoal pull NAME`; anything else is a path.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

DEFAULT_MODEL = "smollm2-135m"


def cache_dir() -> Path:
    """`$SHOAL_HOME`, or `$XDG_CACHE_HOME/shoal`, or `~/.cache/shoal`."""
    if home := os.environ.get("SHOAL_HOME"):
        return Path(home)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shoal"


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model on disk. `name` is what clients ask for."""

    name: str
    path: Path

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer.json"

    @property
    def tokenizer_config(self) -> Path:
        return self.path / "tokenizer_config.json"

    def tokenizer_digest(self) -> bytes:
        """32 bytes over tokenizer.json: gateway and worker mean the same ids only if theirs are equal."""
        return hashlib.blake2b(self.tokenizer.read_bytes(), digest_size=32).digest()


def folder_of(model: str) -> ModelFolder:
    """The folder that a pulled name or a path means, whether it is there or not."""
    if is_path(model):
        return ModelFolder(Path(model).resolve().name, Path(model).resolve())
    return ModelFolder(model, cache_dir() / "models" / model)


def is_path(model: str) -> bool:
    """Whether a model is given as a path, not as the name of a pulled one."""
    return "/" in model or model.startswith(".")


def find(model: str) -> ModelFolder:
    """The folder of a pulled name or a path. Raises InvalidRequest (field `model`) that says what to do."""
    from mesh.errors import InvalidRequest  # brings grpc, which `shoal --help` must not wait for

    folder = folder_of(model)
    if not folder.tokenizer.is_file():
        of_path = "give the path of a folder with tokenizer.json and weights"
        advice = of_path if is_path(model) else f"run `shoal pull {model}` first"
        raise InvalidRequest(f"no model at {folder.path} (no tokenizer.json there): {advice}", field="model")
    return folder
