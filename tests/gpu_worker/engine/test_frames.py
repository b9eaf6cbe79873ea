"""Frames: whole messages, however the bytes arrive, and an end that is noticed."""

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.engine.frames import FramePort, Frames, framed


@given(st.lists(st.binary(max_size=300)), st.lists(st.integers(1, 50), min_size=1))
def test_messages_come_out_whole_however_the_stream_is_cut(messages, cuts):
    stream, frames, out, at = b"".join(map(framed, messages)), Frames(), [], 0
    for index in range(len(stream) + 1):
        size = cuts[index % len(cuts)]
        out += frames.feed(stream[at : at + size])
        at += size
    assert out == messages


def test_a_message_that_was_read_with_the_one_before_is_pending_without_the_socket():
    ours, theirs = map(FramePort, socket.socketpair())
    for message in (b"one", b"", b"three"):
        ours.send(message)
    assert theirs.pending()
    assert theirs.receive() == b"one"
    assert theirs.holds
    assert [theirs.receive(), theirs.receive()] == [b"", b"three"]
    assert not theirs.pending()
    ours.close()
    theirs.close()


def test_the_end_comes_after_all_that_was_said():
    ours, theirs = map(FramePort, socket.socketpair())
    ours.send(b"last words")
    ours.close()
    assert theirs.pending(5)
    assert theirs.receive() == b"last words"
    assert theirs.pending(5)
    with pytest.raises(EOFError):
        theirs.receive()
    theirs.close()
