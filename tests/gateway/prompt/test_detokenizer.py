"""Text is whole characters, the same however its tokens arrive."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.prompt.detokenizer import Detokenizer
from gateway.prompt.text_model import TextModel

SPLIT_CHARACTERS = "很 and 👩‍👩‍👧 and 안녕, done"
few = settings(max_examples=100, deadline=None)
Make = Callable[..., TextModel]


def joined(detokenizer: Detokenizer, pushes: Sequence[Sequence[int]]) -> str:
    return "".join(map(detokenizer.push, pushes)) + detokenizer.finish()


def cut(ids: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """`ids` in pieces of these lengths, the rest in one."""
    pieces, start = [], 0
    for length in lengths:
        pieces.append(list(ids[start : start + length]))
        start += length
    return [*pieces, list(ids[start:])]


def test_no_push_carries_part_of_a_character(model: TextModel) -> None:
    ids = model.encode_text(SPLIT_CHARACTERS)
    assert len(ids) > len(SPLIT_CHARACTERS.encode()) / 2, "this text is to take several tokens a character"
    detokenizer = model.detokenizer()
    deltas = [detokenizer.push([token]) for token in ids]
    assert "".join(deltas) + detokenizer.finish() == SPLIT_CHARACTERS
    assert not any("\ufffd" in delta for delta in deltas)


def test_a_character_unfinished_at_the_end_is_one_replacement_however_it_arrives(model: TextModel) -> None:
    ids = model.encode_text("ok 很")
    assert len(model.encode_text("很")) > 1, "this character is to take several tokens"
    for pieces in ([ids[:-1]], [[token] for token in ids[:-1]]):
        assert joined(model.detokenizer(), pieces) == "ok \ufffd"


@given(
    ids=st.lists(st.integers(0, 49151) | st.integers(17, 250), max_size=30),
    lengths=st.lists(st.integers(0, 5), max_size=10),
)
@few
def test_joined_pushes_equal_the_whole_decode(
    model: TextModel, reference: Any, ids: list[int], lengths: list[int]
) -> None:
    assert joined(model.detokenizer(), cut(ids, lengths)) == reference.decode(ids, skip_special_tokens=True)


def test_special_tokens_and_ids_beyond_the_vocabulary_carry_no_text(model: TextModel) -> None:
    ids = model.encode_text("a")
    assert joined(model.detokenizer(), [[1, *ids, 2, 49152, 10**9]]) == "a"


def test_a_tokens_own_text_and_bytes_are_told_for_log_probabilities(model: TextModel) -> None:
    ids = model.encode_text("很")
    assert b"".join(model.token_text(token)[1] for token in ids) == "很".encode()
    assert model.token_text(ids[0])[0] == "\ufffd"
    assert model.token_text(2) == ("<|im_end|>", b"<|im_end|>")
    assert model.token_text(10**9) == ("", b"")


def test_byte_fallback_tokens_are_joined_and_a_leading_space_is_kept(make: Make) -> None:
    model = make("llama", eos_token="</s>")
    ids = [model.vocabulary.full.token_to_id(token) for token in ("▁ab", "<0xE5>", "<0xBE>", "<0x88>", "</s>", "▁ab")]
    detokenizer = model.detokenizer([1])
    assert [detokenizer.push([token]) for token in ids] == [" ab", "", "", "很", "", " ab"]
    assert detokenizer.finish() == ""


@given(ids=st.lists(st.integers(0, 9), max_size=12), lengths=st.lists(st.integers(0, 4), max_size=6))
@few
def test_a_decoder_without_bytes_gives_the_whole_decode_too(
    words: TextModel, ids: list[int], lengths: list[int]
) -> None:
    whole = words.vocabulary.full.decode([5, *ids], skip_special_tokens=True)
    assert "do" + joined(words.detokenizer([5]), cut(ids, lengths)) == whole


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory, made_in: Make) -> TextModel:
    return made_in(tmp_path_factory.mktemp("words"), "words")
