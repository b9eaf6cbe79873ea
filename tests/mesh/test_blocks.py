"""Chain keys: equal keys mean equal meaning, and nothing else does."""

from hypothesis import given
from hypothesis import strategies as st

from mesh.blocks import BLOCK_TOKENS, KEY_BYTES, chain_keys, namespace

ROOT = namespace(b"m" * 32, b"t" * 32, "", b"tenant")
tokens = st.lists(st.integers(0, 200_000), max_size=100)


@given(tokens, tokens)
def test_keys_agree_exactly_as_far_as_full_blocks_do(left: list[int], right: list[int]) -> None:
    keys, others = chain_keys(ROOT, left), chain_keys(ROOT, right)
    for index, (a, b) in enumerate(zip(keys, others, strict=False), start=1):
        assert (a == b) == (left[: index * BLOCK_TOKENS] == right[: index * BLOCK_TOKENS])


@given(tokens)
def test_only_full_blocks_have_keys(ids: list[int]) -> None:
    keys = chain_keys(ROOT, ids)
    assert len(keys) == len(ids) // BLOCK_TOKENS
    assert all(len(key) == KEY_BYTES for key in keys)


@given(st.binary(max_size=8), st.binary(max_size=8), st.text(max_size=4), st.binary(max_size=8))
def test_moving_bytes_between_parts_changes_the_namespace(
    model: bytes, tokenizer: bytes, adapter: str, salt: bytes
) -> None:
    here = namespace(model, tokenizer, adapter, salt)
    assert here != namespace(model + b"x", tokenizer, adapter, salt)
    if salt:
        assert here != namespace(model, tokenizer, adapter + salt[:1].decode("latin-1"), salt[1:])


def test_an_adapter_named_like_a_salt_is_another_namespace() -> None:
    assert namespace(b"m", b"t", "blue", b"") != namespace(b"m", b"t", "", b"blue")
