"""The histogram of one thread says what prometheus_client's own would."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from mesh.histogram import LoopHistogram

BOUNDS = (0.001, 0.5, 1, 10)
seconds = st.floats(0, 100) | st.sampled_from(BOUNDS)


def _exposed(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


@given(st.lists(st.tuples(st.sampled_from("ab"), seconds), min_size=1))
def test_a_scrape_reads_as_that_of_the_librarys_own_histogram(observed: list[tuple[str, float]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    fast = LoopHistogram("shoal_x_seconds", "Some seconds.", ["model"], BOUNDS, ours)
    slow = Histogram("shoal_x_seconds", "Some seconds.", ["model"], buckets=BOUNDS, registry=theirs)
    for model, value in observed:
        fast.labels(model).observe(value)
        slow.labels(model).observe(value)
    assert _exposed(ours) == _exposed(theirs)
