"""Stop strings end a choice wherever their tokens are cut; nothing else is withheld for good."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.prompt.detokenizer import ByteDetokenizer, TokenTexts
from gateway.stream import ChoiceText, Markers, Piece, Watcher


class Vocabulary:
    """Tokens spelled by the test: `ids` gives each text the next number."""

    def __init__(self, *tokens: str | bytes) -> None:
        self.texts = [token if isinstance(token, bytes) else token.encode() for token in tokens]
        self.ids = list(range(len(tokens)))

    def choice(self, *stops: str) -> ChoiceText:
        return ChoiceText(ByteDetokenizer(TokenTexts.of(self.texts)), stops)


def run(choice: ChoiceText, pushes: Sequence[Sequence[int]]) -> Piece:
    """All that was delivered, and how it ended."""
    pieces = [choice.push(ids) for ids in pushes] + [choice.finish()]
    return Piece("".join(piece.text for piece in pieces), pieces[-1].stopped, pieces[-1].keep_tokens)


def one_by_one(vocabulary: Vocabulary, *stops: str) -> Piece:
    return run(vocabulary.choice(*stops), [[token] for token in vocabulary.ids])


def test_a_stop_across_tokens_is_not_delivered() -> None:
    tokens = Vocabulary("ABC", "DEF", "G", "HI", "J", "K")
    assert one_by_one(tokens, "DEFGHIJ") == Piece("ABC", True, 5)


def test_only_what_may_become_a_stop_is_held_and_a_false_start_arrives_whole() -> None:
    tokens = Vocabulary("ABC", "DE", "DEF", "X", "Y")
    choice = tokens.choice("DEFGHIJ")
    assert [choice.push([token]).text for token in tokens.ids] == ["ABC", "", "DE", "DEFX", "Y"]


def test_what_is_held_when_the_choice_ends_is_delivered() -> None:
    choice = Vocabulary("AB").choice("BC")
    assert choice.push([0]) == Piece("A", False, 1)
    assert choice.finish() == Piece("B", False, 1)


def test_text_after_a_stop_in_the_same_token_and_after_it_is_dropped() -> None:
    tokens = Vocabulary("a", "bSTOPc", "d")
    choice = tokens.choice("STOP")
    assert choice.push(tokens.ids) == Piece("ab", True, 2)
    assert choice.push(tokens.ids) == Piece("", True, 2)
    assert choice.finish() == Piece("", True, 2)


@pytest.mark.parametrize(
    ("stops", "text"),
    [
        (["b", "bc"], "a"),
        (["bc", "b"], "a"),
        (["abcd", "bc"], "a"),  # "bc" is complete first
        (["cd", "abcd"], ""),  # complete on one character: the longer, so that no part of a stop is let through
        (["e", "d"], "abc"),
    ],
)
@pytest.mark.parametrize("tokens", [("abcde",), ("ab", "cd", "e"), ("a", "b", "c", "d", "e")])
def test_of_overlapping_stops_the_first_to_be_complete_wins(
    stops: list[str], text: str, tokens: tuple[str, ...]
) -> None:
    assert one_by_one(Vocabulary(*tokens), *stops).text == text


def test_a_stop_inside_a_character_split_over_tokens_is_found() -> None:
    raw = "x很y".encode()
    tokens = Vocabulary(*(raw[i : i + 1] for i in range(len(raw))))
    assert one_by_one(tokens, "很y") == Piece("x", True, 5)


def test_a_stop_that_the_last_unfinished_character_completes_is_found() -> None:
    tokens = Vocabulary("ab", "很".encode()[:2])
    assert one_by_one(tokens, "b\ufffd") == Piece("a", True, 2)


def test_without_stops_nothing_is_held() -> None:
    tokens = Vocabulary("a", "b")
    choice = tokens.choice()
    assert choice.push([0, 1]) == Piece("ab", False, 2)
    assert choice.finish() == Piece("", False, 2)


LETTERS = [b"a", b"b", b"ab", b"ba", b"aab", b"", "é".encode()[:1], "é".encode()[1:], b"abab"]
some_stops = st.lists(st.text("abé", min_size=1, max_size=5), min_size=1, max_size=4)
some_ids = st.lists(st.integers(0, len(LETTERS) - 1), max_size=20)


@given(ids=some_ids, stops=some_stops, cuts=st.lists(st.integers(0, 20), max_size=8))
@settings(max_examples=300, deadline=None)
def test_text_and_tokens_do_not_depend_on_how_ids_arrive(ids: list[int], stops: list[str], cuts: list[int]) -> None:
    tokens = Vocabulary(*LETTERS)
    edges = sorted({0, *(min(c, len(ids)) for c in cuts), len(ids)})
    pushes = [ids[start:end] for start, end in pairwise(edges)]
    assert run(tokens.choice(*stops), pushes) == run(tokens.choice(*stops), [ids])


@given(ids=some_ids, stops=some_stops)
@settings(max_examples=300, deadline=None)
def test_the_text_is_that_before_the_first_completed_stop(ids: list[int], stops: list[str]) -> None:
    tokens = Vocabulary(*LETTERS)
    whole = run(tokens.choice(), [ids]).text
    ends = [(whole.find(stop) + len(stop), whole.find(stop)) for stop in stops if stop in whole]
    piece = run(tokens.choice(*stops), [[token] for token in ids])
    assert piece.stopped == bool(ends)
    assert piece.text == (whole[: min(ends)[1]] if ends else whole)
    kept = run(tokens.choice(), [ids[: piece.keep_tokens]]).text
    assert not ends or len(kept) >= min(ends)[0]


@given(ids=some_ids, stops=some_stops)
@settings(max_examples=200, deadline=None)
def test_less_than_the_longest_stop_is_ever_held(ids: list[int], stops: list[str]) -> None:
    tokens = Vocabulary(*LETTERS)
    free, watched = tokens.choice(), tokens.choice(*stops)
    seen = delivered = 0
    for token in ids:
        seen += len(free.push([token]).text)
        piece = watched.push([token])
        delivered += len(piece.text)
        assert piece.stopped or seen - delivered < max(map(len, stops))


def test_a_reasoning_tag_in_two_tokens_is_found_and_the_rest_can_be_followed() -> None:
    watcher = Watcher(Markers(["<think>", "</think>"]))
    assert watcher.push("<thi") == ("", None)
    free, found = watcher.push("nk>why</th")
    assert free == ""
    assert found is not None
    assert (found.marker, found.rest) == (0, "why</th")
    assert watcher.push(found.rest) == ("why", None)
    free, found = watcher.push("ink>so")
    assert free == ""
    assert found is not None
    assert (found.marker, found.rest) == (1, "so")


def test_an_empty_marker_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        Markers(["a", ""])
