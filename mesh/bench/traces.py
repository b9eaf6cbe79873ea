"""Published serving traces as requests: when they came, how long they were, and which prefixes they shared.

Two forms are read, plain or .gz: CSV with TIMESTAMP, ContextTokens, GeneratedTokens (Azure's public LLM traces), and
JSON lines with timestamp (ms), input_length, output_length, hash_ids of 512-token blocks (Mooncake's).
"""

import csv
import gzip
import io
import random
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import groupby, islice
from pathlib import Path

import msgspec

from mesh.bench.answer import Ask
from mesh.bench.prompts import text, text_of_blocks
from mesh.bench.report import CannotMeasure

# Arrivals of one tick are spread until the next one, but over no more than this.
MOST_SPREAD_S = 3.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """One row: seconds from the trace's first, tokens in and out, and the ids of the prompt's blocks if it has them."""

    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


class _Line(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def read(path: Path, limit: int | None = None) -> list[Arrival]:
    """The first `limit` rows, the first at second 0. Raises CannotMeasure, naming the line, for what it cannot read."""
    try:
        with _opened(path) as file:
            jsonl = ".jsonl" in path.suffixes
            rows = list(islice(_json_lines(file, path) if jsonl else _csv(file, path), limit))
    except (OSError, EOFError, UnicodeDecodeError, csv.Error, zlib.error) as error:
        raise CannotMeasure(f"cannot read the trace {path}: {error}") from None
    if not rows:
        raise CannotMeasure(f"the trace {path} holds no request")
    first = rows[0].at_s
    return [replace(row, at_s=row.at_s - first) for row in rows]


def spread(arrivals: Iterable[Arrival], seed: int) -> Iterator[Arrival]:
    """Arrivals that share a tick, as recorders make them, at random times until the next tick; in order of time."""
    rng = random.Random(seed)
    ticks = [list(group) for _, group in groupby(arrivals, key=lambda row: row.at_s)]
    for index, tick in enumerate(ticks):
        if len(tick) == 1:
            yield tick[0]
            continue
        following = ticks[index + 1][0].at_s if index + 1 < len(ticks) else tick[0].at_s + MOST_SPREAD_S
        room_s = min(MOST_SPREAD_S, following - tick[0].at_s)
        offsets = sorted(rng.uniform(0, room_s) for _ in tick)
        yield from (replace(row, at_s=row.at_s + offset) for row, offset in zip(tick, offsets, strict=True))


def asks(arrivals: Iterable[Arrival], *, speedup: float, most_input: int | None, seed: int) -> Iterator[Ask]:
    """The trace as requests, `speedup` times as fast; prompts over `most_input` tokens are cut to it."""
    rng = random.Random(seed)
    for row in arrivals:
        tokens = row.input_tokens if most_input is None else min(row.input_tokens, most_input)
        prompt = text_of_blocks(row.blocks, tokens) if row.blocks else text(tokens, rng)
        yield Ask(prompt=prompt, output_tokens=max(1, row.output_tokens), at_s=row.at_s / speedup)


def _opened(path: Path) -> io.TextIOBase:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")


def _json_lines(file: Iterable[str], path: Path) -> Iterator[Arrival]:
    decoder = msgspec.json.Decoder(_Line)
    for number, line in enumerate(file, 1):
        try:
            row = decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise CannotMeasure(f"{path}, line {number}: {error}") from None
        yield Arrival(row.timestamp / 1000, row.input_length, row.output_length, tuple(row.hash_ids))


def _csv(file: Iterable[str], path: Path) -> Iterator[Arrival]:
    for number, row in enumerate(csv.DictReader(file), 2):
        try:
            second, _, fraction = row["TIMESTAMP"].partition(".")
            at_s = (datetime.fromisoformat(second) - datetime(1970, 1, 1)).total_seconds() + float(f"0.{fraction or 0}")
            yield Arrival(at_s, int(row["ContextTokens"]), int(row["GeneratedTokens"]))
        except (KeyError, TypeError, ValueError) as error:
            raise CannotMeasure(
                f"{path}, line {number}: {error!r}; columns TIMESTAMP, ContextTokens, GeneratedTokens are needed"
            ) from None
