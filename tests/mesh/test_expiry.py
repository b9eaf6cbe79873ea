"""The end of a certificate is told long before it comes."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from mesh.cli.authority import Authority, Validity
from mesh.expiry import Expiry, ending_soon
from mesh.tls import WORKER, Tls

from .conftest import NOW, write


def test_only_certificates_that_end_within_a_fortnight_are_warned_of() -> None:
    day = 86_400.0
    sentences = list(ending_soon({"a.pem": 13 * day, "b.pem": 15 * day, "c.pem": -1.0}, now=0.0))
    assert len(sentences) == 2
    assert "a.pem ends in 13.0 days" in sentences[0]
    assert "c.pem has expired" in sentences[1]


async def test_the_end_of_a_certificate_is_a_metric_and_near_its_end_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, eventually: Callable[..., Awaitable[object]]
) -> None:
    soon = Validity.days(3)
    write(tmp_path, WORKER, Authority(NOW), soon)
    registry = CollectorRegistry()
    reminding = asyncio.ensure_future(Expiry(Tls(tmp_path, WORKER), registry).remind())
    await eventually(lambda: "worker.pem ends in 3.0 days" in caplog.text)
    assert "ca.pem" not in caplog.text
    ends = registry.get_sample_value("shoal_tls_certificate_expires_timestamp_seconds", {"file": "worker.pem"})
    assert ends == int(soon.end.timestamp())
    reminding.cancel()
