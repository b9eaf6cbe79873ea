"""One gRPC server of the mesh: truthful health, reflection, size and keepalive limits, and a drain that loses nothing.

Order of stopping (SIGTERM or SIGINT): health says NOT_SERVING, new work is refused with a Cause that sends it
elsewhere, running work may end within `drain_s`, then the server closes. `drain_s` must be shorter than the kill
timer outside.
"""

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from mesh.errors import Unavailable, errors_as_status
from mesh.malformed import RefuseMalformed
from mesh.probe import LIVENESS
from mesh.settings import SettingsError
from mesh.tls import Tls
from shoal.channel import ChannelOptions, server_options

log = logging.getLogger("shoal.server")

AddService = Callable[[grpc.aio.Server], None]
# After running work has ended: seconds for the last bytes to leave.
CLOSE_S = 0.5


class InFlight:
    """Counts work, so that a drain refuses what is new and waits for what runs."""

    def __init__(self) -> None:
        self.draining = False
        self._count = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def count(self) -> int:
        return self._count

    @asynccontextmanager
    async def work(self) -> AsyncIterator[None]:
        """One unit of work. Raises Unavailable (draining) once a drain began."""
        if self.draining:
            raise Unavailable("shutting down; ask another replica", code="draining", retry_after_s=1)
        self._count += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._count -= 1
            if not self._count:
                self._idle.set()

    @asynccontextmanager
    async def rpc(self, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
        """`work` around a gRPC handler, errors turned into statuses."""
        async with errors_as_status(context), self.work():
            yield

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new work and wait for the rest; False if some was left when the time was over."""
        self.draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True


class Server:
    """A grpc.aio server with health and reflection. `services` maps full names to functions that register them."""

    def __init__(
        self,
        services: Mapping[str, AddService],
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        in_flight: InFlight | None = None,
        options: ChannelOptions = (),
    ) -> None:
        """`options` come before those that all servers share: of two with one name gRPC takes the first."""
        self.in_flight = in_flight or InFlight()
        self._names = tuple(services)
        self._health = health.aio.HealthServicer()
        self._server = grpc.aio.server(
            interceptors=[*interceptors, RefuseMalformed()], options=(*options, *server_options())
        )
        for add in services.values():
            add(self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (*self._names, "grpc.health.v1.Health", reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def start(self, host: str, port: int, tls: Tls | None = None, *, client_certificates: bool = True) -> int:
        """Listen, NOT_SERVING at first but for LIVENESS; returns the port, which is chosen if `port` is 0.

        With `tls` nobody comes in without it, nor without a certificate of the CA while `client_certificates`.
        Raises SettingsError if it cannot listen there.
        """
        await self.set_serving(False)
        await self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        try:
            bound = self._bind(f"{host}:{port}", tls, client_certificates)
        except RuntimeError as error:
            raise SettingsError(f"cannot listen on {host}:{port}: taken, or no address of this machine") from error
        await self._server.start()
        return bound

    def _bind(self, address: str, tls: Tls | None, client_certificates: bool) -> int:
        if tls is None:
            return self._server.add_insecure_port(address)
        return self._server.add_secure_port(address, tls.server_credentials(client_certificates=client_certificates))

    async def set_serving(self, serving: bool) -> None:
        """What grpc.health.v1 answers, for the whole server ("") and for each service."""
        if self.in_flight.draining:
            serving = False
        answer = health_pb2.HealthCheckResponse
        for name in ("", *self._names):
            await self._health.set(name, answer.SERVING if serving else answer.NOT_SERVING)

    async def drain(self, timeout_s: float) -> bool:
        """Stop taking work, give the rest `timeout_s`, close. False if some work had to be cut."""
        self.in_flight.draining = True
        await self.set_serving(False)
        ended = await self.in_flight.drain(timeout_s)
        if not ended:
            log.warning("drain time is over: %d calls are cut", self.in_flight.count)
        await self._server.stop(CLOSE_S)
        return ended


def run(main: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Run a service until SIGTERM or SIGINT sets the event it is given, and it returns. Exit code 0 then."""

    async def until_signal() -> None:
        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopping.set)
        await main(stopping)

    uvloop.run(until_signal())
