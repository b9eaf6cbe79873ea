"""The life of a service's process: settings, telemetry, serving until a signal, an exit code that says how it went.

    0  drained after SIGTERM or SIGINT
    1  what it lives for is lost (ProcessFailed): whoever watches it starts a fresh one
    2  settings that cannot be used (a worker's damaged model, too), in one line: starting it again does not help

Both errors are told in one line without a traceback; anything else is a bug and shows one.
"""

import asyncio
import errno
import gc
import importlib.metadata
import logging
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from mesh.expiry import Expiry
from mesh.server import run
from mesh.settings import UNUSABLE_SETTINGS, ServiceSettings, SettingsError, unknown_variables
from mesh.telemetry import Telemetry
from mesh.tls import Tls, TlsError

S = TypeVar("S", bound=ServiceSettings)
VERSION = importlib.metadata.version("shoal")

# Allocations between two looks for garbage, and how often a look goes deeper. Python's own (700, 10, 10) look through a
# busy service's objects two hundred times a second, and all of them are in use.
GC_THRESHOLDS = (10_000, 20, 50)

log = logging.getLogger("shoal.process")


class ProcessFailed(Exception):
    """What the process lives for is lost. The message says why; `code` is the process's exit code."""

    code = 1


def run_service(
    kind: type[S],
    instance: Callable[[S], str],
    serve: Callable[[S, Telemetry, asyncio.Event], Awaitable[None]],
) -> int:
    """Serve until a signal, and return the exit code. `instance` names the process in logs and traces."""
    try:
        settings = kind.load()
        check_ports(settings)
        tls = tls_of(settings)
    except SettingsError as error:
        print(f"shoal {kind.service.lower()}: {error}", file=sys.stderr)
        return UNUSABLE_SETTINGS
    telemetry = Telemetry(settings, instance(settings), VERSION)
    for warning in unknown_variables(kind):
        log.warning(warning)

    async def serve_on(stopping: asyncio.Event) -> None:
        async with _reminding(tls, telemetry):
            await serve(settings, telemetry, stopping)

    gc.freeze()  # the modules: they stay
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        return _exit_code(serve_on)
    finally:
        telemetry.stop()


def tls_of(settings: ServiceSettings) -> Tls | None:
    """The service's identity and whom it believes; None where TLS is off. Raises SettingsError."""
    if not settings.tls_dir:
        return None
    try:
        return Tls(Path(settings.tls_dir), settings.service.lower())
    except TlsError as error:
        raise SettingsError(f"{settings.variable('tls_dir')}: {error}") from None


@asynccontextmanager
async def _reminding(tls: Tls | None, telemetry: Telemetry) -> AsyncIterator[None]:
    """Warn of certificates that end soon, as long as the block runs."""
    if tls is None:
        yield
        return
    async with asyncio.TaskGroup() as tasks:
        reminding = tasks.create_task(Expiry(tls, telemetry.registry).remind())
        yield
        reminding.cancel()


def _exit_code(serve: Callable[[asyncio.Event], Awaitable[None]]) -> int:
    code = 0
    try:
        run(serve)
    except* ProcessFailed as failed:
        first = _first(failed)
        log.error("%s", first, extra={"fields": {"event": "failed"}})
        code = first.code if isinstance(first, ProcessFailed) else 1
    except* SettingsError as unusable:
        log.error("%s", _first(unusable), extra={"fields": {"event": "unusable_settings"}})
        code = UNUSABLE_SETTINGS
    return code


def _first(group: BaseExceptionGroup[Exception]) -> BaseException:
    """The first error that is no group."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def check_ports(settings: ServiceSettings) -> None:
    """Raise SettingsError, naming the variable, for a port that is taken: before a model is loaded for nothing.

    Another process may still take it before we listen; then listening fails, with less to say.
    """
    seen: dict[int, str] = {}
    for name in type(settings).model_fields:
        port = getattr(settings, name)
        if not name.endswith("port") or not port:
            continue
        variable = settings.variable(name)
        if port in seen:
            raise SettingsError(f"{variable}: {seen[port]} is {port} already")
        seen[port] = variable
        _try_to_bind(settings, port, variable)


def _try_to_bind(settings: ServiceSettings, port: int, variable: str) -> None:
    host, errors = settings.host.strip("[]"), []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise SettingsError(f"{settings.variable('host')}: {host} is no address ({error.strerror})") from None
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as error:
                errors.append(error)
    taken = next((error for error in errors if error.errno == errno.EADDRINUSE), None)
    if taken is not None or len(errors) == len(found):
        reason = (taken or errors[0]).strerror
        raise SettingsError(f"{variable}: cannot listen on {settings.host}:{port}: {reason}")
