"""One tree, one table: an error keeps its meaning over a real gRPC hop."""

import gc
import weakref

import grpc
import pytest

from mesh import errors
from mesh.client import connect
from shoal.channel import MAX_MESSAGE_BYTES, server_options

ALL = [
    errors.InvalidRequest("bad role", field="messages[0].role", code="bad_role"),
    errors.PayloadTooLarge("9 MiB is over 4 MiB", field="prompt"),
    errors.Unauthenticated("no key"),
    errors.PermissionDenied("not yours"),
    errors.AlreadyExists("runs"),
    errors.Superseded("newer attempt"),
    errors.Mismatch("other tokenizer"),
    errors.Overloaded("full", retry_after_s=7),
    errors.QuotaExceeded("bucket empty", retry_after_s=2.5),
    errors.Unavailable("draining", code="draining", retry_after_s=1),
    errors.DeadlineExceeded("too late"),
    errors.Internal("a bug"),
]


class Failing(grpc.GenericRpcHandler):
    """Answers every call by one handler."""

    def __init__(self, handler: grpc.RpcMethodHandler) -> None:
        self._handler = handler

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return self._handler


async def over_the_wire(error: errors.ShoalError, payload: bytes = b"") -> errors.ShoalError:
    async def handle(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        async with errors.errors_as_status(context):
            raise error

    return await served(grpc.unary_unary_rpc_method_handler(handle), payload)


async def served(handler: grpc.RpcMethodHandler, payload: bytes = b"") -> errors.ShoalError:
    """What a client reads of a call that `handler` ends with an error."""
    server = grpc.aio.server(options=server_options())
    server.add_generic_rpc_handlers((Failing(handler),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with connect(f"127.0.0.1:{port}") as channel:
            with pytest.raises(errors.ShoalError) as caught:
                async with errors.status_as_errors():
                    await channel.unary_unary("/test/Fail")(payload, timeout=5)
        return caught.value
    finally:
        await server.stop(0)


@pytest.mark.parametrize("error", ALL, ids=lambda error: type(error).__name__)
async def test_an_error_comes_back_as_it_was_raised(error: errors.ShoalError) -> None:
    received = await over_the_wire(error)
    assert type(received) is type(error)
    assert (received.message, received.field, received.code) == (error.message, error.field, error.code)
    assert received.retry_after_s == error.retry_after_s


class Payload:
    """Stands for what a handler holds of its request."""


async def test_what_a_handler_held_is_free_as_soon_as_its_call_was_refused() -> None:
    held: list[weakref.ref[Payload]] = []

    async def deeper() -> None:
        payload = Payload()
        held.append(weakref.ref(payload))
        raise errors.DeadlineExceeded("too slow")

    async def handle(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        async with errors.errors_as_status(context):
            await deeper()
        return b""

    gc.disable()  # cycles wait for it, and large things make it run no sooner
    try:
        await served(grpc.unary_unary_rpc_method_handler(handle))
        assert held[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("mebibytes", [4.2, 33])
async def test_a_message_over_the_limit_is_too_large_and_not_too_busy(mebibytes: float) -> None:
    received = await over_the_wire(errors.Internal("never reached"), bytes(int(mebibytes * (1 << 20))))
    assert type(received) is errors.PayloadTooLarge
    assert errors.kind_of(received).http == 413
    assert errors.retry_after_header(received) is None


@pytest.mark.parametrize("size", [int(3.9 * (1 << 20)), MAX_MESSAGE_BYTES - 64])
async def test_a_message_under_the_limit_passes(size: int) -> None:
    received = await over_the_wire(errors.Internal("reached"), bytes(size))
    assert type(received) is errors.Internal
    assert received.message == "reached"


def test_retry_after_is_whole_seconds_and_at_least_one() -> None:
    assert errors.retry_after_header(errors.Overloaded("full", retry_after_s=0.01)) == "1"
    assert errors.retry_after_header(errors.Overloaded("full", retry_after_s=2.1)) == "3"
    assert errors.retry_after_header(errors.Unavailable("gone")) is None


def test_every_error_has_a_row_of_its_own_or_its_parents() -> None:
    def tree(cls: type[errors.ShoalError]) -> set[type[errors.ShoalError]]:
        return {cls, *(leaf for child in cls.__subclasses__() for leaf in tree(child))}

    for cls in tree(errors.ShoalError) - {errors.ShoalError}:
        kind = errors.kind_of(cls("x"))
        assert 400 <= kind.http < 600
        assert kind.status is not grpc.StatusCode.OK


def test_status_of_packs_field_and_delay_as_google_rpc_details() -> None:
    status = errors.status_of(errors.QuotaExceeded("x", field="model", retry_after_s=1.5))
    names = sorted(detail.TypeName() for detail in status.details)
    assert names == ["google.rpc.BadRequest", "google.rpc.ErrorInfo", "google.rpc.RetryInfo"]
