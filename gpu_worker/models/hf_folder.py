"""A Hugging Face folder as a checkpoint: config.json and *.safetensors, single or sharded with an index."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from gpu_worker.models.errors import LoadError
from gpu_worker.models.json_file import read_json

if TYPE_CHECKING:
    from collections.abc import Mapping

INDEX = "model.safetensors.index.json"
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class SafetensorsCheckpoint:
    """A folder; files stay memory-mapped while this lives."""

    def __init__(self, folder: Path) -> None:
        self.source = folder / "config.json"
        self.config: Mapping[str, Any] = read_json(self.source)
        self._file_of = _weight_map(folder)
        self.files = sorted(set(self._file_of.values()))
        self._open = {path: _opened(path) for path in self.files}
        for name, path in self._file_of.items():
            if name not in self._open[path].keys():  # noqa: SIM118 - safe_open is no mapping
                raise LoadError(path, f"missing, though {INDEX} places it here", tensor=name)

    def names(self) -> set[str]:
        return set(self._file_of)

    def file_of(self, name: str) -> Path:
        return self._file_of[name]

    def read(self, name: str) -> torch.Tensor:
        path = self._file_of[name]
        try:
            tensor: torch.Tensor = self._open[path].get_tensor(name)
        except SafetensorError as error:
            raise LoadError(path, f"cannot be read: {error}", tensor=name) from error
        if tensor.dtype not in _FLOATS:
            raise LoadError(path, f"has dtype {tensor.dtype}; expected a 16-, 32- or 64-bit float", tensor=name)
        return tensor.float()


def _weight_map(folder: Path) -> dict[str, Path]:
    """Tensor name -> file: from the index where there is one, else from the files' own headers."""
    index = folder / INDEX
    if not index.is_file():
        files = sorted(folder.glob("*.safetensors"))
        return {name: path for path in files for name in _opened(path).keys()}  # noqa: SIM118
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict):
        raise LoadError(index, "lacks weight_map")
    for file in set(names.values()):
        if Path(str(file)).name != file:
            raise LoadError(index, f"names {file!r}, which is not a file of this folder")
    return {str(name): folder / file for name, file in names.items()}


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise LoadError(path, f"not a whole safetensors file ({error}); fetch it again") from error
