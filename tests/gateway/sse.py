"""A streamed answer of the HTTP door, read to its end."""

import json
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass
class Stream:
    """A read SSE body."""

    status: int
    headers: httpx.Headers
    lines: list[str]

    @property
    def chunks(self) -> list[dict[str, Any]]:
        return [json.loads(line[6:]) for line in self.lines if line.startswith("data: {")]

    @property
    def done(self) -> bool:
        return [line for line in self.lines if line][-1] == "data: [DONE]"

    def choices(self, index: int = 0) -> list[dict[str, Any]]:
        return [choice for chunk in self.chunks for choice in chunk.get("choices", []) if choice["index"] == index]

    def texts(self, index: int = 0) -> list[str]:
        return [text for c in self.choices(index) if (text := c.get("text") or c.get("delta", {}).get("content"))]

    def text(self, index: int = 0) -> str:
        return "".join(self.texts(index))

    def reason(self, index: int = 0) -> str | None:
        [reason] = [choice["finish_reason"] for choice in self.choices(index) if choice["finish_reason"]]
        return reason

    @property
    def usage(self) -> dict[str, Any] | None:
        return self.chunks[-1].get("usage")

    @property
    def error(self) -> dict[str, Any] | None:
        return next((chunk["error"] for chunk in self.chunks if "error" in chunk), None)
