"""Requests that wait outside the schedule until their grammar is compiled, while all others go on."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from gpu_worker.engine.sequence import Request
from mesh.errors import InvalidRequest, ShoalError
from mesh.sampling import Sampling

if TYPE_CHECKING:
    from concurrent.futures import Future

    from gpu_worker.engine.grammar import Grammar


class Compiler(Protocol):
    """Where grammars come from (grammar_compiler.py)."""

    def prepare(self, sampling: Sampling) -> "Future[Grammar] | None":
        """The grammar, now or later; None if none is asked for. It, or its future, may raise a ShoalError."""

    def warm(self) -> None:
        """Get ready in the background, so that the first structured answer need not wait."""


class NoGrammars:
    """The compiler of an engine that cannot follow a grammar."""

    def prepare(self, sampling: Sampling) -> "Future[Grammar] | None":
        if sampling.structure is not None:
            field = sampling.structure[0]
            raise InvalidRequest(f"{field}: this worker gives no structured answers", field=field)
        return None

    def warm(self) -> None:
        """Nothing to do."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that was taken, and turns out to be one that can never run."""

    request: Request
    error: ShoalError


class Preparations:
    """Who waits for which grammar. Looked at between steps; never waits itself."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self._waiting: list[tuple[Request, Future[Grammar]]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def warm(self) -> None:
        """Nobody is waiting: get ready for whoever will."""
        self._compiler.warm()

    def wanted(self, sampling: Sampling) -> "Future[Grammar] | None":
        """What a request has to wait for. Raises at once what is known already: a ShoalError."""
        future = self._compiler.prepare(sampling)
        if future is not None and future.done():
            future.result()
        return future

    def add(self, request: Request, future: "Future[Grammar]") -> None:
        self._waiting.append((request, future))

    def settled(self) -> list[Request | Refused]:
        """Those whose wait is over, in order. Who has ended is forgotten; what nobody waits for is called off."""
        present = [(request, future) for request, future in self._waiting if not _ended(request)]
        for future in {future for _, future in self._waiting} - {future for _, future in present}:
            future.cancel()
        over = [future.done() for _, future in present]  # asked once: another thread ends them
        self._waiting = [one for one, done in zip(present, over, strict=True) if not done]
        return [_settle(*one) for one, done in zip(present, over, strict=True) if done]


def _ended(request: Request) -> bool:
    return all(sequence.ended for sequence in request.sequences)


def _settle(request: Request, future: "Future[Grammar]") -> Request | Refused:
    error = future.exception()
    if isinstance(error, ShoalError):
        return Refused(request, error)
    request.grammar = future.result()
    return request
