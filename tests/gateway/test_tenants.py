"""Keys lead to tenants, and a mistake in the file is named."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from gateway import tenants
from gateway.tenants import DEFAULT_TENANT, Tenants, hash_key
from mesh.errors import Unauthenticated
from mesh.settings import SettingsError

KEY = "sk-test"


def tenant(**fields: str) -> str:
    """A [[tenant]] table, its fields written as TOML; an empty one is left out."""
    given = {"name": '"acme"', "keys": f'["{hash_key(KEY)}"]', "capacity": "1000", "refill_per_s": "10", **fields}
    return "[[tenant]]\n" + "\n".join(f"{key} = {value}" for key, value in given.items() if value) + "\n"


def load(tmp_path: Path, text: str, *, keys_required: bool = True) -> Tenants:
    path = tmp_path / "tenants.toml"
    path.write_text(text)
    return Tenants.load(path, keys_required=keys_required)


@pytest.mark.parametrize("header", [f"Bearer {KEY}", f"bearer  {KEY} ", KEY])
def test_a_key_leads_to_its_tenant(tmp_path: Path, header: str) -> None:
    found = load(tmp_path, tenant(max_priority='"batch"')).authenticate(header)
    assert (found.name, found.capacity, found.refill_per_s, found.max_priority) == ("acme", 1000.0, 10.0, "batch")


@pytest.mark.parametrize(
    ("header", "code"),
    [
        (None, "missing_api_key"),
        ("", "missing_api_key"),
        ("Bearer ", "missing_api_key"),
        ("Bearer sk-other", "invalid_api_key"),
        (f"Bearer {hash_key(KEY)}", "invalid_api_key"),
        ("Bearer \ud800", "invalid_api_key"),
    ],
)
def test_without_a_known_key_nobody_enters_and_the_key_is_not_repeated(
    tmp_path: Path, header: str | None, code: str
) -> None:
    with pytest.raises(Unauthenticated) as refused:
        load(tmp_path, tenant()).authenticate(header)
    assert refused.value.code == code
    assert "sk-other" not in refused.value.message


def test_without_keys_everyone_is_the_default_tenant() -> None:
    assert Tenants.open().authenticate(None) == DEFAULT_TENANT
    assert Tenants.open().authenticate("Bearer anything") == DEFAULT_TENANT
    assert Tenants.open().open_to_all


def test_where_keys_are_not_required_a_known_key_still_counts(tmp_path: Path) -> None:
    found = load(tmp_path, "[default]\ncapacity = 5\nrefill_per_s = 1\n" + tenant(), keys_required=False)
    assert found.authenticate(KEY).name == "acme"
    assert found.authenticate(None).capacity == 5.0
    assert not found.open_to_all


def test_kv_is_shared_in_a_group_only(tmp_path: Path) -> None:
    rows = [
        tenant(name=f'"{name}"', keys=f'["{hash_key(name)}"]', kv_group=group)
        for name, group in (("a", '"g"'), ("b", '"g"'), ("c", ""), ("g", ""))
    ]
    found = load(tmp_path, "".join(rows))
    a, b, c, g = (found.authenticate(name).salt for name in "abcg")
    assert a == b
    assert len({a, c, g, DEFAULT_TENANT.salt}) == 4


def test_a_tenant_may_use_its_own_priority_and_lower_ones() -> None:
    assert DEFAULT_TENANT.may_use("high")
    assert not replace(DEFAULT_TENANT, max_priority="normal").may_use("high")
    assert replace(DEFAULT_TENANT, max_priority="normal").may_use("batch")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[[tenant]\n", "line 1"),
        ("[tenants]\n", "'tenants'"),
        ("[tenant]\nname = 'a'\n", "[[tenant]]"),
        (tenant(name=""), "tenant[0].name"),
        (tenant(name='"Acme Inc"'), "tenant[0].name"),
        (tenant(name='"default"'), "tenant[0].name"),
        (tenant(keys=""), "tenant[0].keys"),
        (tenant(keys='["sk-secret"]'), "tenant[0].keys[0]"),
        (tenant(capacity="0"), "tenant[0].capacity"),
        (tenant(capacity="true"), "tenant[0].capacity"),
        (tenant(refill_per_s="nan"), "tenant[0].refill_per_s"),
        (tenant(refill_per_s=""), "tenant[0].refill_per_s"),
        (tenant(max_priority='"urgent"'), "tenant[0].max_priority"),
        (tenant(kv_group="3"), "tenant[0].kv_group"),
        (tenant(colour='"red"'), "tenant[0].colour"),
        (tenant() + tenant(), "tenant[1].name"),
        (tenant() + tenant(name='"other"'), "tenant[1].keys"),
        ("[default]\nname = 'x'\n", "default"),
        ("[default]\ncapacity = 1\n", "default.refill_per_s"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load(tmp_path, text)
    assert named in str(refused.value)
    assert "tenants.toml" in str(refused.value)
    assert "sk-secret" not in str(refused.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"absent\.toml"):
        Tenants.load(tmp_path / "absent.toml")


def test_a_hash_made_as_the_docstring_says_is_what_the_file_takes(tmp_path: Path) -> None:
    [line] = [line for line in (tenants.__doc__ or "").splitlines() if "sha256sum" in line]
    script = f'{line}; printf %s "$key"'
    hashed, key = subprocess.run(["sh", "-c", script], check=True, capture_output=True, text=True).stdout.split("\n")
    keys = f'["sha256:{hashed.split()[0]}"]'
    assert load(tmp_path, tenant(keys=keys)).authenticate(f"Bearer {key}").name == "acme"
