"""Percentiles, the histogram, pairs and the fit of two costs."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.bench.stats import Histogram, per_unit, percentile, ratio_of_pairs

positive = st.floats(min_value=1e-5, max_value=1e4)


def test_a_percentile_is_the_nearest_rank():
    assert percentile([3, 1, 2, 4], 0.5) == 2
    assert percentile([3, 1, 2, 4], 0.95) == 4
    assert percentile([], 0.5) is None


@given(st.lists(positive, min_size=1, max_size=200), st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_a_histograms_percentile_is_within_one_percent(values, share):
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    assert histogram.count == len(values)
    assert math.isclose(histogram.percentile(share), percentile(values, share), rel_tol=0.0101)


def test_tokens_that_came_together_are_gaps_of_nothing():
    histogram = Histogram()
    for gap in (0.0, 0.0, 0.010):
        histogram.add(gap)
    assert histogram.percentile(0.5) == 0
    assert histogram.percentile(0.99) == pytest.approx(0.010, rel=0.01)
    assert Histogram().percentile(0.5) is None


def test_drift_that_hits_both_of_a_pair_leaves_the_ratio():
    assert ratio_of_pairs([1, 2, 4, 8, 16], [2, 4, 8, 16, 32]) == 0.5


@given(positive, positive)
def test_the_fit_finds_the_two_costs(per_request, per_token):
    samples = [
        (n, n * length, n * per_request + n * length * per_token) for n, length in ((90, 16), (40, 64), (80, 16))
    ]
    found = per_unit(samples)
    assert found[0] * 90 + found[1] * 90 * 16 == pytest.approx(samples[0][2], rel=1e-6)
    assert found[1] * 48 == pytest.approx(per_token * 48, rel=1e-3, abs=1e-3 * per_request)


def test_one_answer_length_cannot_tell_requests_from_tokens():
    with pytest.raises(ValueError, match="lengths"):
        per_unit([(10, 160, 1.0), (20, 320, 2.0)])
