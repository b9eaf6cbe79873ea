"""Which text is compiled next: short ones pass long ones, and everyone's turn comes."""

from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.engine.grammar_line import OLDEST, PLACES, SHORT_CHARACTERS, SHORT_ONLY, SHORTEST, Line
from gpu_worker.engine.grammar_workshop import Job


def line_of(*lengths: int) -> Line:
    line = Line()
    for number, length in enumerate(lengths):
        line.add(Job(number, "regex", "x" * length))
    return line


def taken(line: Line, place: int) -> int | None:
    job = line.next(place)
    return None if job is None else job.number


def test_the_place_for_short_texts_takes_the_shortest_and_no_long_one():
    line = line_of(SHORT_CHARACTERS + 1, 50, 3, SHORT_CHARACTERS)
    assert [taken(line, SHORT_ONLY) for _ in range(4)] == [2, 1, 3, None]


def test_another_place_takes_the_shortest_of_any_length():
    line = line_of(2 * SHORT_CHARACTERS, SHORT_CHARACTERS + 1, 3)
    assert [taken(line, SHORTEST) for _ in range(4)] == [2, 1, 0, None]


def test_the_last_place_takes_what_has_waited_longest():
    line = line_of(50, SHORT_CHARACTERS + 1, 3)
    assert [taken(line, OLDEST) for _ in range(4)] == [0, 1, 2, None]


def test_what_is_dropped_is_not_taken():
    line = line_of(1, 2)
    line.drop(0)
    line.drop(7)
    assert [taken(line, place) for place in PLACES[:2]] == [1, None]


@given(st.lists(st.integers(1, 2 * SHORT_CHARACTERS), min_size=1), st.lists(st.sampled_from(PLACES)))
def test_each_text_is_taken_once(lengths, places):
    line = line_of(*lengths)
    numbers = [taken(line, place) for place in places + [OLDEST] * len(lengths)]
    assert sorted(number for number in numbers if number is not None) == list(range(len(lengths)))


@given(st.integers(0, 5))
def test_a_long_text_waits_for_no_more_than_those_before_it_however_many_short_ones_come(before):
    line = line_of(*[SHORT_CHARACTERS + 1] * (before + 1))
    for number in range(before + 1):
        line.add(Job(100 + number, "regex", "x"))
        taken(line, SHORTEST)
        assert taken(line, OLDEST) == number
