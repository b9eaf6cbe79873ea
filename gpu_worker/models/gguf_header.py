"""A *.gguf file's header: metadata, and where each tensor lies. Format: ggml's docs/gguf.md, versions 2 and 3.

The gguf library's own reader believes every length it meets: a flipped bit makes it build lists of gigabytes, or gives
tensors that end early. Here nothing is made of a length before it is known to fit into the file. Strings of an array
are only counted (a vocabulary has 50,000 and more, and this side of the mesh needs none of them).
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from gpu_worker.models.errors import LoadError

MAGIC = 0x46554747  # "GGUF", little-endian
VERSIONS = (2, 3)
MAX_ITEMS = 1 << 24  # of one array
MAX_NAME = 1 << 16  # bytes of a key or a tensor's name
MAX_TEXT = 1 << 26  # bytes of a value: chat templates and licences are the longest
MAX_DIMENSIONS = 4
ALIGNMENT = 32  # where general.alignment says nothing
_SCALARS = {
    0: struct.Struct("<B"), 1: struct.Struct("<b"), 2: struct.Struct("<H"), 3: struct.Struct("<h"),
    4: struct.Struct("<I"), 5: struct.Struct("<i"), 6: struct.Struct("<f"), 7: struct.Struct("<?"),
    10: struct.Struct("<Q"), 11: struct.Struct("<q"), 12: struct.Struct("<d"),
}  # fmt: skip
_U32, _U64, _STRING, _ARRAY = _SCALARS[4], _SCALARS[10], 8, 9


@dataclass(frozen=True, slots=True)
class Strings:
    """An array of strings in the metadata, of which only the number is kept."""

    count: int


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor lies in the file, and as what. `shape` is in numpy's order: rows first."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    n_bytes: int


class Damage(Exception):
    """What is wrong with the bytes."""


class _Cursor:
    """Reads on through the mapped file; a read past its end raises Damage."""

    def __init__(self, data: np.ndarray) -> None:
        self._view = data.data
        self.at = 0

    @property
    def left(self) -> int:
        return len(self._view) - self.at

    def number(self, form: struct.Struct = _U64) -> Any:
        if form.size > self.left:
            raise Damage(f"it ends at byte {len(self._view)}, within its header")
        (value,) = form.unpack_from(self._view, self.at)
        self.at += form.size
        return value

    def text(self, what: str, most: int = MAX_TEXT) -> str:
        length = int(self.number())
        if length > min(most, self.left):
            raise Damage(f"{what} is {length} bytes long; {min(most, self.left)} are possible")
        start, self.at = self.at, self.at + length
        try:
            return str(self._view[start : self.at], "utf-8")
        except UnicodeDecodeError:
            raise Damage(f"{what} is not UTF-8") from None

    def skip_texts(self, count: int, key: str) -> None:
        """Go behind `count` strings. Written for speed: there are a hundred thousand of them."""
        view, at, last, unpack = self._view, self.at, len(self._view) - _U64.size, _U64.unpack_from
        for index in range(count):
            if at > last:
                raise Damage(f"it ends within {key}, at string {index} of {count}")
            (length,) = unpack(view, at)
            at += _U64.size + length
        if at > len(view):
            raise Damage(f"it ends within {key}, at its last string")
        self.at = at

    def count(self, what: str, item_bytes: int, most: int = MAX_ITEMS) -> int:
        """How many items follow, each of at least `item_bytes`."""
        count = int(self.number())
        if count > min(most, self.left // item_bytes):
            raise Damage(f"it claims {count} {what}; {min(most, self.left // item_bytes)} are possible")
        return count

    def value(self, kind: int, key: str) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.text(key)
        if kind != _ARRAY:
            raise Damage(f"{key} has the unknown type {kind}")
        item = self.number(_U32)
        if item == _STRING:
            strings = Strings(self.count(f"strings in {key}", _U64.size))
            self.skip_texts(strings.count, key)
            return strings
        if item not in _SCALARS:
            raise Damage(f"{key} is an array of the unknown type {item}")
        return self._array(_SCALARS[item], key)

    def _array(self, form: struct.Struct, key: str) -> list[Any]:
        count = self.count(f"values in {key}", form.size)
        start, self.at = self.at, self.at + count * form.size
        return [value for (value,) in form.iter_unpack(self._view[start : self.at])]


@dataclass(frozen=True, slots=True)
class Header:
    """What stands before the tensors' data."""

    values: dict[str, Any]  # scalars, strings, lists of scalars, Strings
    tensors: dict[str, TensorPlace]


def read_header(path: Path, data: np.ndarray) -> Header:
    """The header of a file that is mapped as bytes. Raises LoadError."""
    try:
        return _header(_Cursor(data))
    except Damage as damage:
        raise LoadError(path, f"not a whole GGUF file: {damage}; fetch it again") from None


def _header(cursor: _Cursor) -> Header:
    if (magic := cursor.number(_U32)) != MAGIC:
        raise Damage(f"it begins with {magic.to_bytes(4, 'little')!r}; expected b'GGUF'")
    if (version := cursor.number(_U32)) not in VERSIONS:
        raise Damage(f"its version is {version}; expected 2 or 3, little-endian")
    tensors, entries = cursor.count("tensors", 24, 1 << 20), cursor.count("metadata entries", 13, 1 << 20)
    values: dict[str, Any] = {}
    for _ in range(entries):
        key = cursor.text("a key of its metadata", MAX_NAME)
        if key in values:
            raise Damage(f"its metadata holds {key} twice")
        values[key] = cursor.value(cursor.number(_U32), key)
    places = [_place(cursor) for _ in range(tensors)]
    return Header(values, _placed(places, _alignment(values), cursor))


def _alignment(values: dict[str, Any]) -> int:
    alignment = values.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise Damage(f"general.alignment is {alignment!r}; expected a power of two")
    return alignment


def _place(cursor: _Cursor) -> TensorPlace:
    """One tensor's info, its offset still counted from where the data begin."""
    name = cursor.text("a tensor's name", MAX_NAME)
    dimensions = cursor.number(_U32)
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise Damage(f"tensor {name} has {dimensions} dimensions; expected 1 to {MAX_DIMENSIONS}")
    shape = tuple(int(cursor.number()) for _ in range(dimensions))[::-1]
    kind, offset = cursor.number(_U32), int(cursor.number())
    try:
        kind = GGMLQuantizationType(kind)
    except ValueError:
        raise Damage(f"tensor {name} has the unknown type {kind}") from None
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if min(shape) < 1 or shape[-1] % block:
        raise Damage(f"tensor {name} has shape {list(shape)}, whose rows are no whole blocks of {block}")
    elements = 1
    for size in shape:
        elements *= size
    return TensorPlace(name, kind, shape, offset, elements // block * block_bytes)


def _placed(places: list[TensorPlace], alignment: int, cursor: _Cursor) -> dict[str, TensorPlace]:
    """Tensors with offsets from the file's begin: aligned, within the file, and none over another."""
    start = -(-cursor.at // alignment) * alignment
    size = cursor.at + cursor.left
    found: dict[str, TensorPlace] = {}
    end = 0
    for place in sorted(places, key=lambda place: place.offset):
        if place.name in found:
            raise Damage(f"it holds tensor {place.name} twice")
        if place.offset % alignment:
            raise Damage(f"tensor {place.name} begins at {place.offset}, no multiple of {alignment}")
        if place.offset < end:
            raise Damage(f"tensor {place.name} begins at {place.offset}, within the one before it")
        end = place.offset + place.n_bytes
        if start + end > size:
            raise Damage(f"tensor {place.name} ends at byte {start + end}, but the file at {size}")
        found[place.name] = TensorPlace(place.name, place.kind, place.shape, start + place.offset, place.n_bytes)
    return found
