"""What both front doors stand on, and the gate that every request passes: who asks, and whether we take more."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from gateway.catalogue import Catalogue
from gateway.metrics import Metrics
from gateway.relay import Relay
from gateway.tenants import Tenants
from gateway.validate import Validator
from mesh.errors import Unavailable
from mesh.server import InFlight


@dataclass(frozen=True, slots=True)
class Core:
    """One per process."""

    tenants: Tenants
    validator: Validator
    relay: Relay
    catalogue: Catalogue
    metrics: Metrics
    in_flight: InFlight
    max_in_flight: int

    @asynccontextmanager
    async def admitted(self) -> AsyncIterator[None]:
        """Around one request. Raises Unavailable when too many run or the process is shutting down."""
        if self.in_flight.count >= self.max_in_flight:
            raise Unavailable(
                f"this gateway works on {self.max_in_flight} requests already", code="busy", retry_after_s=1
            )
        async with self.in_flight.work():
            self.metrics.in_flight.inc()
            try:
                yield
            finally:
                self.metrics.in_flight.dec()

    @property
    def missing(self) -> list[str]:
        """What keeps this process from taking requests; empty = ready."""
        return ["shutting down"] if self.in_flight.draining else self.catalogue.missing()
