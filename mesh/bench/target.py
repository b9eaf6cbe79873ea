"""Where a benchmark's requests go: what a target does with one, and what all requests to it say."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from mesh.bench.answer import Ask, Outcome

# The likeliest token always: two runs, and two servers, do the same work.
TEMPERATURE = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOptions:
    """What every request to a target says."""

    model: str
    api: str = "chat"  # or "completions"
    ignore_eos: bool = True
    api_key: str | None = None
    ca: str | None = (
        None  # PEM file of who signed the server's certificate; None = whom HTTP trusts, and no TLS in gRPC
    )
    timeout_s: float = 300.0
    more: dict[str, Any] = field(default_factory=dict)  # further fields of each HTTP request


class Target(Protocol):
    """Where requests go. `ask` returns when the request has ended, however it did."""

    async def ask(self, ask: Ask, outcome: Outcome, gap: Callable[[float], None]) -> None: ...
