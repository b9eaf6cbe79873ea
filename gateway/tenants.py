"""Who is asking, and what they may use: API keys and tenants from one TOML file.

    [default]                        # optional: callers without a key, when keys are off
    capacity = 4000000               # token-equivalents the bucket holds (mesh/cost.py)
    refill_per_s = 100000            # token-equivalents it gains per second

    [[tenant]]
    name = "acme"
    keys = ["sha256:…"]              # 64 hex digits, made as below
    capacity = 200000
    refill_per_s = 2000
    max_priority = "normal"          # high, normal (default) or batch
    kv_group = "acme-staging"        # optional: tenants of one group share cached KV; default: nobody shares

Keys are stored as SHA-256 and looked up by it, so the file gives no key away and the time of a look-up says nothing
about how much of a guess was right. A key is a long random text, for which a fast hash is enough; in a shell:

    key=sk-$(openssl rand -hex 32); printf %s "$key" | sha256sum
"""

import hashlib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mesh.errors import Unauthenticated
from mesh.settings import SettingsError

# Best first, as in types.proto: a tenant may ask for its own priority and any after it.
PRIORITIES = ("high", "normal", "batch")
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_HASH = re.compile(r"sha256:[0-9a-f]{64}")
_FIELDS = frozenset({"name", "keys", "capacity", "refill_per_s", "max_priority", "kv_group"})


@dataclass(frozen=True, slots=True)
class Tenant:
    """One customer. `capacity` is in token-equivalents, `refill_per_s` in token-equivalents per second.

    `salt` roots the tenant's KV block keys (mesh/blocks.py): equal salts share cached prefixes, others never do.
    """

    name: str
    capacity: float
    refill_per_s: float
    max_priority: str = "normal"
    salt: bytes = b""

    def may_use(self, priority: str) -> bool:
        """Whether `priority` (one of PRIORITIES) is not above the tenant's own."""
        return PRIORITIES.index(priority) >= PRIORITIES.index(self.max_priority)


def salt_of(kind: str, name: str) -> bytes:
    """32 bytes for a tenant's or a group's name; the kind keeps a tenant from being named like another's group."""
    return hashlib.blake2b(name.encode(), digest_size=32, person=f"shoal-{kind}".encode()).digest()


# A machine of one's own: wide enough never to be felt there, narrow enough to stop a runaway loop.
DEFAULT_TENANT = Tenant("default", 4_000_000.0, 100_000.0, "high", salt_of("tenant", "default"))


def hash_key(key: str) -> str:
    """How a key is written in the file."""
    return "sha256:" + hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()


class Tenants:
    """Every tenant of this gateway. `keys_required` False = any caller without a key is the default tenant."""

    def __init__(self, by_hash: Mapping[str, Tenant], default: Tenant = DEFAULT_TENANT, *, keys_required: bool) -> None:
        self._by_hash = dict(by_hash)
        self._default = default
        self.keys_required = keys_required

    @classmethod
    def open(cls) -> "Tenants":
        """No file, no keys: everyone is the default tenant. For loopback."""
        return cls({}, keys_required=False)

    @classmethod
    def load(cls, path: Path, *, keys_required: bool = True) -> "Tenants":
        """Reads `path`. Raises SettingsError that names the file and the line or field to mend."""
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise SettingsError(f"{path}: {error}") from None
        try:
            return cls(_by_hash(table), _default(table), keys_required=keys_required)
        except SettingsError as error:
            raise SettingsError(f"{path}: {error}") from None

    @property
    def open_to_all(self) -> bool:
        """Whether there are no keys at all."""
        return not self._by_hash and not self.keys_required

    def authenticate(self, authorization: str | None) -> Tenant:
        """The tenant of an `authorization` header or metadata value, "Bearer <key>" or the bare key.

        Raises Unauthenticated for an unknown key, and for none where keys are required. Where they are not, any key is
        taken, known or not: the OpenAI client insists on sending one.
        """
        key = (authorization or "").strip()
        scheme, _, rest = key.partition(" ")
        if scheme.lower() == "bearer":
            key = rest.strip()
        if (tenant := self._by_hash.get(hash_key(key))) is not None:
            return tenant
        if not self.keys_required:
            return self._default
        if not key:
            raise Unauthenticated("give an API key: Authorization: Bearer <key>", code="missing_api_key")
        raise Unauthenticated("this API key is not known here", code="invalid_api_key")


def _by_hash(table: Mapping[str, Any]) -> dict[str, Tenant]:
    if unknown := set(table) - {"default", "tenant"}:
        raise SettingsError(f"unknown table {min(unknown)!r}; there are [default] and [[tenant]]")
    rows = table.get("tenant", [])
    if not isinstance(rows, list):
        raise SettingsError("tenant must be a list of tables: write [[tenant]]")
    owners: dict[str, Tenant] = {}
    names: set[str] = {DEFAULT_TENANT.name}
    for index, row in enumerate(rows):
        where = f"tenant[{index}]"
        tenant = _tenant(where, row)
        if tenant.name in names:
            raise SettingsError(f"{where}.name: {tenant.name!r} is taken")
        names.add(tenant.name)
        for hashed in _keys(f"{where}.keys", row.get("keys")):
            if hashed in owners:
                raise SettingsError(f"{where}.keys: a key of {owners[hashed].name!r} is given again")
            owners[hashed] = tenant
    return owners


def _default(table: Mapping[str, Any]) -> Tenant:
    row = table.get("default")
    if row is None:
        return DEFAULT_TENANT
    if isinstance(row, dict) and ("keys" in row or "name" in row):
        raise SettingsError("default takes neither name nor keys: it is whoever has no key")
    return _tenant("default", {"name": DEFAULT_TENANT.name, "max_priority": DEFAULT_TENANT.max_priority} | row)


def _tenant(where: str, row: Any) -> Tenant:
    if not isinstance(row, dict):
        raise SettingsError(f"{where} must be a table")
    if unknown := set(row) - _FIELDS:
        raise SettingsError(f"{where}.{min(unknown)}: unknown; there are {', '.join(sorted(_FIELDS))}")
    name = row.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise SettingsError(f"{where}.name must be 1 to 64 of a-z, 0-9, '.', '_' and '-', not {name!r}")
    group = row.get("kv_group")
    if group is not None and not (isinstance(group, str) and group):
        raise SettingsError(f"{where}.kv_group must be a text, not {group!r}")
    priority = row.get("max_priority", "normal")
    if priority not in PRIORITIES:
        raise SettingsError(f"{where}.max_priority must be one of {', '.join(PRIORITIES)}, not {priority!r}")
    return Tenant(
        name,
        _positive(f"{where}.capacity", row.get("capacity")),
        _positive(f"{where}.refill_per_s", row.get("refill_per_s")),
        priority,
        salt_of("group", group) if group else salt_of("tenant", name),
    )


def _keys(where: str, raw: Any) -> list[str]:
    if not isinstance(raw, list) or not raw:
        raise SettingsError(f"{where} must be a list of at least one hashed key")
    for index, key in enumerate(raw):
        if not isinstance(key, str) or not _HASH.fullmatch(key):
            raise SettingsError(
                f"{where}[{index}] must be sha256: and 64 hex digits; the key itself stays out of the file"
            )
    return list(raw)


def _positive(where: str, raw: Any) -> float:
    if isinstance(raw, bool) or not isinstance(raw, int | float) or not 0 < raw <= 1e15:
        raise SettingsError(f"{where} must be a number above 0 and at most 1e15, not {raw!r}")
    return float(raw)
