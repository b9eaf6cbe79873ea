"""The end of a process's log, for a human: of a JSON line only what it says."""

import json
from contextlib import suppress
from pathlib import Path


def log_tail(log: Path, lines: int, since_byte: int = 0) -> str:
    """The last `lines` lines of what was written from `since_byte` on, each readable."""
    with suppress(OSError):
        text = log.read_bytes()[since_byte:].decode(errors="replace")
        return "\n".join(map(readable, text.splitlines()[-lines:])) or "(it wrote nothing)"
    return "(no log)"


def complaints(tail: str) -> str:
    """Of what `log_tail` gave, all but the lines that tell of nothing wrong; the whole where no other is there."""
    lines = [line for line in tail.splitlines() if not line.startswith(("info: ", "debug: "))]
    return "\n".join(lines) or tail


def readable(line: str) -> str:
    """A line of JSON as level, message and traceback; any other line as it is."""
    try:
        entry = json.loads(line)
        words = f"{entry['level']}: {entry['message']}"
    except (ValueError, KeyError, TypeError):
        return line
    return "\n".join([words, *filter(None, [entry.get("exception")])])
