"""How a stream's bytes are read, however they were cut."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.bench.answer import Outcome, SseReader, text_of

STREAM = (
    b": a comment\n\n"
    b'data: {"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
    b'data: {"choices":[{"delta":{"content":"One"},"finish_reason":null}],"usage":null}\n\n'
    b'data: {"choices": [{"delta": {"content": " \\"error\\" "}, "finish_reason": null}]}\n\n'
    b'data: {"choices":[{"delta":{"content":"."}}]}\n\n'
    b'data: {"choices":[{"delta":{},"finish_reason":"length"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":3,'
    b'"prompt_tokens_details":{"cached_tokens":4}}}\n\n'
    b"data: [DONE]\n\n"
)


def read(pieces: list[bytes]) -> tuple[Outcome, list[float], bool]:
    outcome, gaps = Outcome(due=0.0, sent=0.0), []
    reader = SseReader(outcome, gaps.append)
    for second, piece in enumerate(pieces, 1):
        reader.feed(piece, float(second))
    return outcome, gaps, reader.done


@given(st.lists(st.integers(0, len(STREAM)), max_size=12), st.booleans())
def test_a_stream_reads_the_same_however_it_is_cut(cuts, windows_ends):
    stream = STREAM.replace(b"\n", b"\r\n") if windows_ends else STREAM
    edges = [0, *sorted(cuts), len(stream)]
    outcome, gaps, done = read([stream[a:b] for a, b in pairwise(edges)])
    outcome.check_whole(3, exact=True)
    assert (outcome.error, done) == ("", True)
    assert (outcome.pieces, outcome.tokens, outcome.prompt_tokens, outcome.cached_tokens) == (3, 3, 9, 4)
    assert outcome.finish == "length"
    assert len(gaps) == 2


def test_the_first_token_is_the_first_text_and_not_the_role():
    lines = STREAM.split(b"\n\n")
    outcome, gaps, _ = read([line + b"\n\n" for line in lines])
    assert (outcome.first, outcome.last) == (3.0, 5.0)
    assert gaps == [1.0, 1.0]


def test_completions_and_reasoning_are_text_too():
    outcome, _, _ = read([b'data: {"choices":[{"text":"x","finish_reason":null}]}\n\n'])
    assert outcome.pieces == 1
    outcome, _, _ = read([b'data: {"choices":[{"delta":{"reasoning_content":"x"},"finish_reason":null}]}\n\n'])
    assert outcome.pieces == 1


@pytest.mark.parametrize(
    "event",
    [
        b'{"choices":["x"]}',
        b'{"choices":5}',
        b'{"choices":[{"delta":"x"}]}',
        b'{"choices":[{"delta":{"content":5}}]}',
        b'{"choices":[{"finish_reason":7}]}',
        b'{"usage":"x"}',
        b'{"usage":{"completion_tokens":"many"}}',
        b'{"usage":{"prompt_tokens":-3}}',
        b'{"usage":{"completion_tokens":1e300}}',
        b'{"usage":{"prompt_tokens_details":{"cached_tokens":"x"}}}',
        b'{"other":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b"[]",
        b"\xff",
    ],
    ids=lambda event: event[:50].decode(errors="replace"),
)
def test_an_event_of_another_shape_fails_its_answer_and_nothing_else(event):
    outcome, _, done = read([b"data: " + event + b"\n\n" + b"data: [DONE]\n\n"])
    assert (outcome.error, done) == ("malformed event", True)
    assert (outcome.tokens, outcome.prompt_tokens, outcome.finish) == (0, None, None)


def test_null_is_nothing_to_say():
    nulls = b'{"error":null,"choices":[{"delta":null,"text":null,"finish_reason":null}],"usage":null}'
    outcome, _, _ = read([b"data: " + nulls + b"\n\n", b'data: {"usage":{"prompt_tokens_details":null}}\n\n'])
    assert (outcome.error, outcome.tokens) == ("", 0)


def test_an_event_without_end_is_not_collected_for_ever():
    outcome, _, _ = read([b"data: " + b"x" * (1 << 21)])
    assert outcome.error == "oversized event"


def test_a_kept_stream_gives_its_text_whatever_the_reads_were_cut_into():
    stream = (
        b'data: {"choices":[{"text":"Par","finish_reason":null}]}\r\n\r\n: comment\n\n'
        b'data: {"choices":[{"delta":{"content":"is"},"finish_reason":null}]}\n\n'
        b'data: {"choices":[],"usage":{"completion_tokens":2}}\n\ndata: [DONE]\n\n'
    )
    outcome = Outcome.now()
    outcome.raw = []
    reader = SseReader(outcome, lambda gap: None)
    for start in range(0, len(stream), 7):
        reader.feed(stream[start : start + 7], 0.0)
    assert text_of(outcome) == "Paris"
    with pytest.raises(ValueError, match="not kept"):
        text_of(Outcome.now())
