"""What is reserved before an answer's length is known."""

from gateway.limits.price import ENOUGH, OutputEstimate, price


def test_the_price_is_that_of_the_one_currency() -> None:
    assert price("smollm2-135m", 100, 25) == 100 * 1.0 + 25 * 4.0


def test_without_a_history_max_tokens_is_reserved() -> None:
    estimate = OutputEstimate()
    for _ in range(ENOUGH - 1):
        estimate.observe("acme", 3)
    assert estimate.expected("acme", 500) == 500


def test_the_tenants_own_95th_percentile_is_reserved_and_never_more_than_max_tokens() -> None:
    estimate = OutputEstimate()
    for tokens in range(1, 41):
        estimate.observe("acme", tokens)
        estimate.observe("other", 1000)
    assert estimate.expected("acme", 500) == 39
    assert estimate.expected("acme", 20) == 20


def test_old_answers_are_forgotten() -> None:
    estimate = OutputEstimate()
    for tokens in [1000] * 64 + [10] * 64:
        estimate.observe("acme", tokens)
    assert estimate.expected("acme", 500) == 10
