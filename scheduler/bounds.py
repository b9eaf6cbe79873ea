"""What a peer's words and numbers may be. A peer that breaks these loses its own stream and harms nobody else's."""

import math
import re

from mesh.errors import InvalidRequest

# Characters of any id or name.
MOST_CHARACTERS = 256
# Choices of one request, whatever the workers could run.
MOST_CHOICES = 1_024
# Nobody waited longer than a day: older claims count as this.
MOST_WAITED_MS = 86_400_000
# Far above any real attempt, and with room above it in the contract's uint32.
MOST_ATTEMPTS = 1 << 31
_UINT32_MAX = (1 << 32) - 1
# A name or IPv4 address, or an IPv6 address in brackets; then a port. No scheme: gRPC would follow unix: and dns:///.
_ADDRESS = re.compile(
    r"(?:[A-Za-z0-9_](?:[A-Za-z0-9_.-]*)|\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?\]):(\d{1,5})", re.ASCII
)


def check_text(value: str, field: str) -> None:
    """Raise InvalidRequest unless the text is short."""
    if len(value) > MOST_CHARACTERS:
        raise InvalidRequest(f"{field}: {len(value)} characters are more than {MOST_CHARACTERS}", field=field)


def check_name(value: str, field: str) -> None:
    """Raise InvalidRequest unless the text is short and printable: logs and other peers show it."""
    check_text(value, field)
    if not value.isprintable():
        raise InvalidRequest(f"{field}: it has characters that cannot be printed", field=field)


def check_address(value: str, field: str) -> None:
    """Raise InvalidRequest unless it is host:port."""
    check_name(value, field)
    found = _ADDRESS.fullmatch(value)
    if found is None or not 0 < int(found[1]) < 1 << 16:
        raise InvalidRequest(f"{field}: {value!r} is not host:port", field=field)


def check_rate(value: float, field: str) -> None:
    """Raise InvalidRequest unless it is a finite number, zero or above."""
    if not (math.isfinite(value) and value >= 0):
        raise InvalidRequest(f"{field}: {value} is no measured value", field=field)


def check_choices(choices: int, field: str) -> None:
    """Raise InvalidRequest for a number of choices that no worker of any mesh runs."""
    if not 1 <= choices <= MOST_CHOICES:
        raise InvalidRequest(f"{field}: {choices} is not between 1 and {MOST_CHOICES}", field=field)


def check_attempt(attempt: int, field: str) -> None:
    """Raise InvalidRequest for an attempt above which there are no numbers left."""
    if attempt > MOST_ATTEMPTS:
        raise InvalidRequest(f"{field}: {attempt} is more than {MOST_ATTEMPTS}", field=field)


def waited_s(waited_ms: int) -> float:
    """Seconds that a peer says were waited, a day at most."""
    return min(waited_ms, MOST_WAITED_MS) / 1_000


def uint32(value: float) -> int:
    """The nearest value that the contract's uint32 holds."""
    return min(max(round(value), 0), _UINT32_MAX)
