"""What crosses the border between a worker and its engine process: one msgpack message per frame.

Commands go in, reports come out. A command that cannot be obeyed answers with `Rejected`; all others answer only
through `StepDone`. The connection's end is the only other signal: each side that reads EOF gives up.
"""

from typing import Literal

import msgspec

from gpu_worker.engine.api import EngineInfo, Plan, StepResult
from mesh.errors import AlreadyExists, Internal, InvalidRequest, Overloaded, ShoalError

ErrorKind = Literal["InvalidRequest", "Overloaded", "AlreadyExists", "Internal"]


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Queue a request. Answered by Rejected, perhaps much later, or by its events in later StepDone reports."""

    plan: Plan


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Free all that the attempt holds. No event of it is reported after the next StepDone."""

    request_id: str
    attempt: int


class Park(msgspec.Struct, frozen=True, tag=True):
    """End the attempt's choices with PARKED."""

    request_id: str
    attempt: int


class StopChoice(msgspec.Struct, frozen=True, tag=True):
    """End one choice with STOP, its output counted as `keep_tokens`."""

    request_id: str
    attempt: int
    choice: int
    keep_tokens: int


class BlockKeys(msgspec.Struct, frozen=True, tag=True):
    """Ask for a Snapshot."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Leave at once. What still runs is lost: drain first."""


Command = Submit | Abort | Park | StopChoice | BlockKeys | Shutdown


class Loading(msgspec.Struct, frozen=True, tag=True):
    """Before Ready: how far loading is (0 to 1) and what it does."""

    fraction: float
    what: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Once: the engine has produced a real token and takes commands."""

    info: EngineInfo


class Rejected(msgspec.Struct, frozen=True, tag=True):
    """A Submit that raised, at once or when its grammar turned out to be none. `error()` is what was raised."""

    request_id: str
    attempt: int
    kind: ErrorKind
    message: str
    field: str | None = None
    code: str | None = None
    retry_after_s: float | None = None

    @classmethod
    def of(cls, plan: Plan, error: ShoalError) -> "Rejected":
        kind: ErrorKind = next((name for name, known in _KINDS.items() if isinstance(error, known)), "Internal")
        return cls(plan.request_id, plan.attempt, kind, error.message, error.field, error.code, error.retry_after_s)

    def error(self) -> ShoalError:
        return _KINDS[self.kind](self.message, field=self.field, code=self.code, retry_after_s=self.retry_after_s)


_KINDS: dict[ErrorKind, type[ShoalError]] = {
    "InvalidRequest": InvalidRequest,
    "Overloaded": Overloaded,
    "AlreadyExists": AlreadyExists,
    "Internal": Internal,
}


class StepDone(msgspec.Struct, frozen=True, tag=True):
    """One step's outcome."""

    result: StepResult


class Snapshot(msgspec.Struct, frozen=True, tag=True):
    """Chain keys of all cached blocks, true after the StepDone reports before it."""

    keys: list[bytes]


Unusable = Literal["model", "setting"]


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot go on (it could not load, or a step broke as a whole); the process ends after it.

    `unusable`: what it was told cannot be done, so a fresh process would fail the same way: the model cannot be served,
    or a setting, which `message` names, leaves no room for it.
    """

    message: str
    unusable: Unusable | None = None


Report = Loading | Ready | Rejected | StepDone | Snapshot | Fatal

_commands = msgspec.msgpack.Decoder(Command)
_reports = msgspec.msgpack.Decoder(Report)
_encoder = msgspec.msgpack.Encoder()


def encode(message: Command | Report) -> bytes:
    """One frame's payload."""
    return _encoder.encode(message)


def decode_command(frame: bytes) -> Command:
    """Raises msgspec.DecodeError on anything that is no command."""
    command: Command = _commands.decode(frame)
    return command


def decode_report(frame: bytes) -> Report:
    """Raises msgspec.DecodeError on anything that is no report."""
    report: Report = _reports.decode(frame)
    return report
