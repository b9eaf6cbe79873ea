"""Tenants with buckets of a test's own; the real Valkey is tests/conftest.py's."""

import pytest

from gateway.tenants import Tenant


@pytest.fixture
def tenant(request: pytest.FixtureRequest) -> Tenant:
    """100 token-equivalents, one of them back every second; a bucket of the test's own."""
    return Tenant(f"t{abs(hash(request.node.nodeid))}", 100.0, 1.0)
