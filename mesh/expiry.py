"""When a process's certificates end: a metric, and in the last fortnight a warning at the start and once a day."""

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Gauge

from mesh.tls import Tls

WARN_DAYS = 14
DAY_S = 86_400

log = logging.getLogger("shoal.tls")


class Expiry:
    """Watches the certificates of `tls`, which may be replaced while the process runs."""

    def __init__(self, tls: Tls, registry: CollectorRegistry) -> None:
        self._tls = tls
        gauge = expiry_gauge(registry)
        for file in tls.current().expires_at:
            gauge.labels(file).set_function(partial(self._expires_at, file))

    def _expires_at(self, file: str) -> float:
        return self._tls.current().expires_at[file]

    async def remind(self) -> None:
        """Until cancelled."""
        while True:
            for sentence in ending_soon(self._tls.current().expires_at, time.time()):
                log.warning("%s", sentence)
            await asyncio.sleep(DAY_S)


def expiry_gauge(registry: CollectorRegistry) -> Gauge:
    """Registered only where TLS is on."""
    return Gauge(
        "shoal_tls_certificate_expires_timestamp_seconds",
        "Unix time at which the process's certificate, or the last CA it believes, ends.",
        ["file"],
        registry=registry,
    )


def ending_soon(expires_at: Mapping[str, float], now: float) -> Iterator[str]:
    """A sentence for each file that ends within WARN_DAYS, or has ended."""
    for file, ends in expires_at.items():
        days = (ends - now) / DAY_S
        if days <= 0:
            yield f"the certificate in {file} has expired: no new connection will be trusted"
        elif days < WARN_DAYS:
            yield f"the certificate in {file} ends in {days:.1f} days: put a new one in its place, no restart is needed"
