"""One tree of errors and one table from error to gRPC status and HTTP status.

    ShoalError
    ├── InvalidRequest        the caller must change `field`
    │   └── PayloadTooLarge   too large, which waiting does not mend
    ├── Unauthenticated       no key, or an unknown one
    ├── PermissionDenied      the key may not do this
    ├── AlreadyExists         the same attempt runs here already
    ├── Superseded            a newer attempt or lease took this one's place
    ├── Mismatch              another model, tokenizer or adapter than the peer's
    ├── Overloaded            no room now; `retry_after_s` says when
    │   └── QuotaExceeded     the tenant's own bucket is empty
    ├── Unavailable           the part that should answer is not there now
    │   └── WorkerLost        it broke in the middle of an answer
    ├── DeadlineExceeded      the caller's time is over
    └── Internal              ours: a bug, or one sequence that failed in a step

Details travel as google.rpc.BadRequest (which field) and google.rpc.RetryInfo (when again), never in payloads.
"""

import math
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import grpc
from google.protobuf.any_pb2 import Any as AnyProto
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status


class ShoalError(Exception):
    """The root. `message` is for the caller: what is wrong and what to do; no internals.

    `code` tells apart causes that share a status: a Cause of types.proto in lower case ("no_room"), or OpenAI's word
    ("model_not_found"). It travels as google.rpc.ErrorInfo.reason; a peer's error without one came from the transport.
    """

    CODE: ClassVar[str | None] = None

    def __init__(
        self, message: str, *, field: str | None = None, code: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.code = code or self.CODE
        self.retry_after_s = retry_after_s


class InvalidRequest(ShoalError):
    """The request can never succeed as it is; `field` names what to change, e.g. `messages[0].role`."""


class PayloadTooLarge(InvalidRequest):
    """Larger than a stated limit. Not retried: it will not shrink."""

    CODE = "too_large"


class Unauthenticated(ShoalError):
    """No key was given, or an unknown one."""


class PermissionDenied(ShoalError):
    """The key is known and may not do this."""


class AlreadyExists(ShoalError):
    """This attempt, or a newer one, of the request runs here."""


class Superseded(ShoalError):
    """A newer attempt, lease or connection of the same identity took over."""

    CODE = "superseded"


class Mismatch(ShoalError):
    """The peers do not agree on model, tokenizer, adapter or geometry."""

    CODE = "mismatch"


class Overloaded(ShoalError):
    """No room now. `retry_after_s` is when it is worth asking again."""

    CODE = "no_room"


class QuotaExceeded(Overloaded):
    """The tenant's bucket does not cover the request's price now."""

    CODE = "quota"


class Unavailable(ShoalError):
    """Whoever should answer is not there; nothing was delivered."""


class WorkerLost(Unavailable):
    """A worker broke or hung and no other could go on."""


class DeadlineExceeded(ShoalError):
    """The time the caller gave is over."""


class Internal(ShoalError):
    """A fault of ours. The message says no more than the caller needs."""


@dataclass(frozen=True, slots=True)
class Kind:
    """How an error looks outside. `openai_type` is the `type` of OpenAI's error body."""

    status: grpc.StatusCode
    http: int
    openai_type: str


KINDS: dict[type[ShoalError], Kind] = {
    InvalidRequest: Kind(grpc.StatusCode.INVALID_ARGUMENT, 400, "invalid_request_error"),
    PayloadTooLarge: Kind(grpc.StatusCode.INVALID_ARGUMENT, 413, "invalid_request_error"),
    Unauthenticated: Kind(grpc.StatusCode.UNAUTHENTICATED, 401, "authentication_error"),
    PermissionDenied: Kind(grpc.StatusCode.PERMISSION_DENIED, 403, "permission_error"),
    AlreadyExists: Kind(grpc.StatusCode.ALREADY_EXISTS, 409, "conflict_error"),
    Superseded: Kind(grpc.StatusCode.ABORTED, 409, "conflict_error"),
    Mismatch: Kind(grpc.StatusCode.FAILED_PRECONDITION, 503, "server_error"),
    Overloaded: Kind(grpc.StatusCode.RESOURCE_EXHAUSTED, 429, "rate_limit_error"),
    Unavailable: Kind(grpc.StatusCode.UNAVAILABLE, 503, "server_error"),
    WorkerLost: Kind(grpc.StatusCode.UNAVAILABLE, 502, "server_error"),
    DeadlineExceeded: Kind(grpc.StatusCode.DEADLINE_EXCEEDED, 504, "timeout_error"),
    Internal: Kind(grpc.StatusCode.INTERNAL, 500, "server_error"),
}

_BY_STATUS: dict[grpc.StatusCode, type[ShoalError]] = {
    kind.status: error for error, kind in KINDS.items() if error not in (WorkerLost, PayloadTooLarge)
} | {grpc.StatusCode.NOT_FOUND: InvalidRequest, grpc.StatusCode.UNIMPLEMENTED: Internal}

# Classes that share their parent's status and are told apart by code.
_NARROW = (PayloadTooLarge, QuotaExceeded)


def kind_of(error: ShoalError) -> Kind:
    """The table's row for `error`: its own, or its nearest ancestor's."""
    return next(KINDS[cls] for cls in type(error).__mro__ if cls in KINDS)


def retry_after_header(error: ShoalError) -> str | None:
    """`Retry-After` in whole seconds, at least 1; None where waiting does not help."""
    if error.retry_after_s is None:
        return None
    return str(max(1, math.ceil(error.retry_after_s)))


def _pack(message: Any) -> AnyProto:
    packed = AnyProto()
    packed.Pack(message)
    return packed


def status_of(error: ShoalError) -> status_pb2.Status:
    """`error` as google.rpc.Status with its field, code and delay as details."""
    details = []
    if error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.message)
        details.append(_pack(error_details_pb2.BadRequest(field_violations=[violation])))
    if error.code is not None:
        details.append(_pack(error_details_pb2.ErrorInfo(reason=error.code, domain="shoal")))
    if error.retry_after_s is not None:
        delay = Duration()
        delay.FromMilliseconds(math.ceil(error.retry_after_s * 1000))
        details.append(_pack(error_details_pb2.RetryInfo(retry_delay=delay)))
    return status_pb2.Status(code=kind_of(error).status.value[0], message=error.message, details=details)


def error_of(rpc_error: grpc.aio.AioRpcError) -> ShoalError:
    """The error a peer meant. A message over the size limit comes back as PayloadTooLarge, never as Overloaded."""
    details = rpc_error.details() or ""
    if rpc_error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
        return PayloadTooLarge(details)
    field = code = retry_after_s = None
    status = _rich_status(rpc_error)
    for detail in status.details if status is not None else ():
        if detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad = error_details_pb2.BadRequest()
            detail.Unpack(bad)
            field = bad.field_violations[0].field if bad.field_violations else None
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            info = error_details_pb2.RetryInfo()
            detail.Unpack(info)
            retry_after_s = info.retry_delay.ToMilliseconds() / 1000
        elif detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            reason = error_details_pb2.ErrorInfo()
            detail.Unpack(reason)
            code = reason.reason
    cls = next((narrow for narrow in _NARROW if code == narrow.CODE), _BY_STATUS.get(rpc_error.code(), Internal))
    return cls(details or rpc_error.code().name, field=field, code=code, retry_after_s=retry_after_s)


def _rich_status(rpc_error: grpc.aio.AioRpcError) -> status_pb2.Status | None:
    for key, value in rpc_error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            return status_pb2.Status.FromString(value if isinstance(value, bytes) else value.encode())
    return None


@asynccontextmanager
async def errors_as_status(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """Inside an RPC handler: a ShoalError ends the RPC with its status and details."""
    try:
        yield
    except ShoalError as error:
        status = rpc_status.to_status(status_of(error))
        # gRPC keeps an aborted call in a cycle: what the handler held of it must not wait for the garbage collector.
        traceback.clear_frames(error.__traceback__)
        await context.abort(status.code, status.details, status.trailing_metadata)


@asynccontextmanager
async def status_as_errors() -> AsyncIterator[None]:
    """Around a call to a peer: a gRPC status is raised as the ShoalError it stands for."""
    try:
        yield
    except grpc.aio.AioRpcError as rpc_error:
        raise error_of(rpc_error) from rpc_error
