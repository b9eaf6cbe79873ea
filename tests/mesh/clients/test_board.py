"""What a scheduler reads off a worker's board is what the worker's cache holds, whatever happened in between."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.clients import board as board_module
from mesh.clients.board import Board, Journal


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


class Reader:
    """A scheduler's own picture, made of what its journal tells."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.keys: set[bytes] = set()
        self.snapshots = 0

    def read(self) -> bool:
        """Take one change; whether it ended a snapshot or none was under way."""
        change = self._journal.take()
        assert len(change.stored) + len(change.evicted) <= board_module.PIECE_KEYS
        if change.snapshot:
            self.snapshots += 1
            self.keys.clear()
        self.keys.difference_update(change.evicted)
        self.keys.update(change.stored)
        return not change.more


steps = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.sets(st.integers(0, 30), max_size=8)),
        st.tuples(st.just("evict"), st.sets(st.integers(0, 30), max_size=8)),
        st.tuples(st.just("read"), st.just(set())),
        st.tuples(st.just("ask"), st.just(set())),
    ),
    max_size=40,
)


@given(steps)
def test_after_any_history_a_reader_that_catches_up_has_the_cache(history: list[tuple[str, set[int]]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(board_module, "PIECE_KEYS", 4)
        board, truth = Board(), set()
        with board.journal() as journal:
            reader = Reader(journal)
            for what, numbers in history:
                keys = {key(number) for number in numbers}
                if what == "store":
                    board.note(keys - truth, set())
                    truth |= keys
                elif what == "evict":
                    board.note(set(), keys & truth)
                    truth -= keys
                elif what == "read":
                    reader.read()
                else:
                    journal.tell_everything()
            for _ in range(40):
                reader.read()
            assert reader.keys == truth


def test_a_reader_starts_with_everything_then_hears_changes_only() -> None:
    board = Board()
    board.note([key(1), key(2)], [])
    with board.journal() as journal:
        reader = Reader(journal)
        reader.read()
        board.note([key(3)], [key(1)])
        reader.read()
        assert reader.keys == {key(2), key(3)}
        assert reader.snapshots == 1


def test_an_empty_cache_is_a_snapshot_too() -> None:
    with Board().journal() as journal:
        change = journal.take()
    assert (change.snapshot, change.more, change.stored) == (True, False, [])


def test_a_large_snapshot_comes_in_pieces_of_the_stated_size_with_changes_after_it() -> None:
    board = Board()
    board.note([key(number) for number in range(70_000)], [])
    with board.journal() as journal:
        first = journal.take()
        board.note([key(70_000)], [])
        second, third, after = journal.take(), journal.take(), journal.take()
    assert [len(piece.stored) for piece in (first, second, third, after)] == [32_768, 32_768, 4_464, 1]
    assert [piece.snapshot for piece in (first, second, third, after)] == [True, False, False, False]
    assert [piece.more for piece in (first, second, third, after)] == [True, True, False, False]


def test_a_reader_that_fell_far_behind_is_told_everything_again() -> None:
    board = Board()
    with board.journal() as journal:
        reader = Reader(journal)
        reader.read()
        for number in range(40_000):
            board.note([key(number)], [key(number - 1)] if number else [])
        while not reader.read():
            pass
        assert reader.snapshots == 2
        assert reader.keys == {key(39_999)}


async def test_news_wakes_a_reader_and_silence_lets_it_go_in_time() -> None:
    board = Board()
    with board.journal() as journal:
        journal.take()
        await journal.news(0.01)
        board.touch()
        await journal.news(60)


def test_readers_do_not_disturb_each_other() -> None:
    board = Board()
    with board.journal() as one, board.journal() as other:
        readers = Reader(one), Reader(other)
        readers[0].read()
        board.note([key(1)], [])
        readers[0].read()
        readers[1].read()
        assert readers[0].keys == readers[1].keys == {key(1)}
