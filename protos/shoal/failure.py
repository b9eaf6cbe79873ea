"""What a call to the mesh raises.

    ShoalClientError
    ├── InvalidRequest   change `field` and ask again
    ├── NotAllowed       no key, an unknown one, or one that may not do this
    ├── Overloaded       no room, or the quota is used up; `retry_after_s` says when to ask again
    ├── Unavailable      nobody answered; safe to ask again if nothing was delivered
    └── TimedOut         the call's own `timeout_s` is over

Anything else the mesh says (a fault of its own) is a plain ShoalClientError.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

# google.rpc's own Python classes live in a package this client does not ask for, so the few fields that are read are
# declared here, in a pool of their own. The numbers are those of google/rpc/status.proto and error_details.proto;
# Any and Duration are spelled out as what they are on the wire.
_DECLARATIONS = """
name: "shoal/failure.proto" package: "shoal.failure" syntax: "proto3"
message_type { name: "Status"
  field { name: "details" number: 3 type: TYPE_MESSAGE type_name: ".shoal.failure.Any" label: LABEL_REPEATED } }
message_type { name: "Any"
  field { name: "type_url" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL }
  field { name: "value" number: 2 type: TYPE_BYTES label: LABEL_OPTIONAL } }
message_type { name: "BadRequest"
  field { name: "field_violations" number: 1 type: TYPE_MESSAGE type_name: ".shoal.failure.Violation"
          label: LABEL_REPEATED } }
message_type { name: "Violation"
  field { name: "field" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL } }
message_type { name: "ErrorInfo"
  field { name: "reason" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL } }
message_type { name: "RetryInfo"
  field { name: "retry_delay" number: 1 type: TYPE_MESSAGE type_name: ".shoal.failure.Duration"
          label: LABEL_OPTIONAL } }
message_type { name: "Duration"
  field { name: "seconds" number: 1 type: TYPE_INT64 label: LABEL_OPTIONAL }
  field { name: "nanos" number: 2 type: TYPE_INT32 label: LABEL_OPTIONAL } }
"""


def _declared() -> dict[str, Any]:
    file = text_format.Parse(_DECLARATIONS, descriptor_pb2.FileDescriptorProto())
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    names = [f"{file.package}.{message.name}" for message in file.message_type]
    return {
        name.rpartition(".")[2]: message_factory.GetMessageClass(pool.FindMessageTypeByName(name)) for name in names
    }


_MESSAGES = _declared()


class ShoalClientError(Exception):
    """The root. `message` is the mesh's own words.

    `code` tells apart causes that share a status ("queue_full", "quota", "model_not_found"); None when the call did
    not reach a service of the mesh.
    """

    def __init__(
        self,
        message: str,
        *,
        status: grpc.StatusCode = grpc.StatusCode.UNKNOWN,
        code: str | None = None,
        field: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.field = field
        self.retry_after_s = retry_after_s


class InvalidRequest(ShoalClientError):
    """The request can never succeed as it is; `field` names what to change, e.g. `messages[0].role`."""


class NotAllowed(ShoalClientError):
    """No key was given, it is unknown, or it may not do this."""


class Overloaded(ShoalClientError):
    """No room now; ask again after `retry_after_s`."""


class Unavailable(ShoalClientError):
    """Nobody answered, or the answer broke off."""


class TimedOut(ShoalClientError):
    """The call took longer than its `timeout_s`."""


_BY_STATUS: dict[grpc.StatusCode, type[ShoalClientError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: InvalidRequest,
    grpc.StatusCode.UNAUTHENTICATED: NotAllowed,
    grpc.StatusCode.PERMISSION_DENIED: NotAllowed,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: TimedOut,
}


def failure_of(status: grpc.StatusCode, message: str, trailing: Any) -> ShoalClientError:
    """The error for a gRPC status. `trailing` is its metadata: (key, value) pairs, or None."""
    kind = _BY_STATUS.get(status, ShoalClientError)
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in message:
        kind = InvalidRequest  # gRPC's own words for a message over the size limit: waiting does not mend it
    code = field = retry_after_s = None
    for name, detail in _details(trailing):
        if name == "google.rpc.BadRequest" and detail.field_violations:
            field = detail.field_violations[0].field
        elif name == "google.rpc.ErrorInfo":
            code = detail.reason
        elif name == "google.rpc.RetryInfo":
            retry_after_s = detail.retry_delay.seconds + detail.retry_delay.nanos / 1e9
    return kind(message or status.name, status=status, code=code, field=field, retry_after_s=retry_after_s)


def _details(trailing: Any) -> Iterator[tuple[str, Any]]:
    for key, value in trailing or ():
        if key != "grpc-status-details-bin":
            continue
        for packed in _MESSAGES["Status"].FromString(value).details:
            name = packed.type_url.rpartition("/")[2]
            kind = _MESSAGES.get(name.removeprefix("google.rpc."))
            if kind is not None:
                yield name, kind.FromString(packed.value)


@contextmanager
def status_as_failure() -> Iterator[None]:
    """Around a call, of either kind of channel: its gRPC status is raised as a ShoalClientError."""
    try:
        yield
    except grpc.RpcError as error:
        # Both kinds of channel raise a subclass that carries these; the base class declares none of them.
        status: Any = error
        raise failure_of(status.code(), status.details() or "", status.trailing_metadata()) from error
