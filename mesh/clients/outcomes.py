"""How an attempt on a worker can end: what the worker's client finds out and the scheduler's client reports."""

from enum import IntEnum


class RefusedCause(IntEnum):
    """Why a worker said no; nothing was computed. Values are those of shoal.scheduler.v1.RefusedCause."""

    NO_ROOM = 1
    DRAINING = 2
    NOT_READY = 3
    MISMATCH = 4
    ALREADY_EXISTS = 5


class FailureKind(IntEnum):
    """How a worker broke. Values are those of shoal.scheduler.v1.FailureKind."""

    CONNECT = 1
    RESET = 2
    HUNG = 3
    STEP_ERROR = 4
    PROTOCOL = 5


class Outcome(IntEnum):
    """How a request ended. Values are those of shoal.scheduler.v1.Outcome."""

    COMPLETED = 1
    CANCELLED = 2
    DEADLINE = 3
    ERROR = 4


class Reason(IntEnum):
    """Why a choice ended. Values are those of shoal.types.v1.FinishReason."""

    STOP = 1
    LENGTH = 2
    PARKED = 3
    ERROR = 4


class WorkerRefused(Exception):
    """The granted worker did not take the request."""

    def __init__(self, cause: RefusedCause, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.cause = cause
        self.retry_after_s = retry_after_s


class WorkerFailed(Exception):
    """The worker took the request and broke, hung or talked nonsense."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind
