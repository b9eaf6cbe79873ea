"""A Hugging Face folder as a checkpoint: config.json and *.safetensors, single or sharded with an index."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from gpu_worker.models.config_check import check_config
from gpu_worker.models.errors import LoadError
from gpu_worker.models.json_file import read_json
from gpu_worker.models.weight_file import WeightFile

if TYPE_CHECKING:
    from collections.abc import Mapping

INDEX = "model.safetensors.index.json"
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # what is of another type is refused when it is read


class SafetensorsCheckpoint:
    """A folder; files stay memory-mapped while this lives."""

    def __init__(self, folder: Path) -> None:
        self.source = folder / "config.json"
        self.config: Mapping[str, Any] = read_json(self.source)
        check_config(self.config, self.source)
        self._file_of = _weight_map(folder)
        paths = sorted(set(self._file_of.values()))
        self._open = {path: _opened(path) for path in paths}
        held = {path: set(opened.keys()) for path, opened in self._open.items()}
        for name, path in self._file_of.items():
            if name not in held[path]:
                raise LoadError(path, f"missing, though {INDEX} places it here", tensor=name)
        self.files = [WeightFile(path) for path in paths]

    def names(self) -> set[str]:
        return set(self._file_of)

    def file_of(self, name: str) -> Path:
        return self._file_of[name]

    def bytes_of(self, name: str) -> int:
        part = self._open[self._file_of[name]].get_slice(name)
        return int(math.prod(part.get_shape()) * _BYTES.get(part.get_dtype(), 1))

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
        return _own_names(sorted(folder.glob("*.safetensors")))
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict):
        raise LoadError(index, f"weight_map is {type(names).__name__}; expected an object from tensor to file")
    for name, file in names.items():
        if not _is_file_name(file):
            raise LoadError(index, f"names {file!r}, which is not a file of this folder", tensor=name)
    return {name: folder / file for name, file in names.items()}


def _is_file_name(file: Any) -> bool:
    """Whether the index may name it: a safetensors file beside it."""
    return isinstance(file, str) and Path(file).name == file and file.endswith(".safetensors") and file.isprintable()


def _own_names(files: list[Path]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for path in files:
        for name in _opened(path).keys():  # noqa: SIM118 - safe_open is no mapping
            if name in found:
                raise LoadError(path, f"is in {found[name].name}, too, and no {INDEX} says which counts", tensor=name)
            found[name] = path
    return found


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise LoadError(path, f"not a whole safetensors file ({error}); fetch it again") from error
