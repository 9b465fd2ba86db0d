"""Limits of one tenant: never more than the limit in any minute."""

from random import Random

import pytest

from tandem_services.router.usage_counters import WINDOW_S, Ask, Refused, UsageLimits, UsageWindows

ONE = Ask(requests=1)


def test_limit_is_reached_and_not_passed():
    windows, limits = UsageWindows(), UsageLimits(requests=3)
    verdicts = [windows.take(limits, ONE, 100.0 + step).refused for step in range(5)]
    assert verdicts == [Refused.NOTHING] * 3 + [Refused.REQUESTS] * 2


def test_request_after_retry_time_is_accepted():
    windows, limits = UsageWindows(), UsageLimits(requests=2, tokens=100)
    windows.take(limits, Ask(requests=1, tokens=40), 100.5)
    windows.take(limits, Ask(requests=1, tokens=50), 110.5)
    refused = windows.take(limits, ONE, 120.0)
    assert (refused.refused, refused.retry_s) == (Refused.REQUESTS, 100 + WINDOW_S + 1 - 120.0)
    assert windows.take(limits, ONE, 120.0 + refused.retry_s - 0.01).refused is Refused.REQUESTS
    assert windows.take(limits, ONE, 120.0 + refused.retry_s).refused is Refused.NOTHING


def test_tokens_count_like_requests_and_all_or_nothing_is_taken():
    windows, limits = UsageWindows(), UsageLimits(requests=10, tokens=100)
    assert windows.take(limits, Ask(requests=1, tokens=90), 5.0).tokens == 90
    usage = windows.take(limits, Ask(requests=1, tokens=11), 6.0)
    assert (usage.refused, usage.requests, usage.tokens) == (Refused.TOKENS, 1, 90)


def test_request_above_limit_never_fits():
    usage = UsageWindows().take(UsageLimits(tokens=100), Ask(tokens=101), 5.0)
    assert (usage.refused, usage.retry_s) == (Refused.TOKENS, None)


def test_unused_tokens_are_returned_to_their_own_second():
    windows, limits = UsageWindows(), UsageLimits(tokens=100)
    second = windows.take(limits, Ask(tokens=100), 0.0).second
    windows.settle(second, -60, 59.0)
    assert windows.take(limits, Ask(tokens=60), 59.0).refused is Refused.NOTHING
    # The 40 leave after a minute. Had the 60 been given back at 59 s, there would be room for 160 now.
    assert windows.take(limits, Ask(tokens=100), 62.0).refused is Refused.TOKENS
    assert windows.take(limits, Ask(tokens=40), 62.0).refused is Refused.NOTHING


def test_refund_of_expired_tokens_frees_no_quota():
    windows, limits = UsageWindows(), UsageLimits(tokens=100)
    second = windows.take(limits, Ask(tokens=100), 0.0).second
    windows.take(limits, Ask(tokens=100), 70.0)
    windows.settle(second, -100, 70.0)
    assert windows.take(limits, Ask(tokens=1), 71.0).refused is Refused.TOKENS


def test_excess_tokens_count_when_they_are_settled():
    windows, limits = UsageWindows(), UsageLimits(tokens=100)
    second = windows.take(limits, Ask(tokens=10), 0.0).second
    windows.settle(second, 200, 30.0)
    assert windows.take(limits, Ask(tokens=1), 80.0).refused is Refused.TOKENS
    assert windows.take(limits, Ask(tokens=1), 91.0).refused is Refused.NOTHING


def test_concurrency_limit_counts_running_requests():
    windows, limits = UsageWindows(), UsageLimits(concurrency=2)
    asks = [windows.take(limits, Ask(requests=1, lease=name), 0.0).refused for name in "abc"]
    assert asks == [Refused.NOTHING, Refused.NOTHING, Refused.CONCURRENCY]
    windows.end("a")
    windows.end("a")
    assert windows.take(limits, Ask(requests=1, lease="c"), 0.0).refused is Refused.NOTHING
    assert windows.take(limits, Ask(requests=1, lease="d"), 0.0).refused is Refused.CONCURRENCY


@pytest.mark.parametrize("seed", range(20))
def test_requests_within_any_minute_stay_within_the_limit(seed):
    random, windows, limits = Random(seed), UsageWindows(), UsageLimits(requests=7, tokens=500)
    granted: list[tuple[float, int]] = []
    now = 0.0
    for _ in range(400):
        now += random.choice([0.0, 0.1, 1.0, 7.0, 30.0])
        ask = Ask(requests=1, tokens=random.randrange(200))
        if windows.take(limits, ask, now).refused is Refused.NOTHING:
            granted.append((now, ask.tokens))
    for start, _ in granted:
        minute = [tokens for at, tokens in granted if start <= at < start + WINDOW_S]
        assert len(minute) <= 7
        assert sum(minute) <= 500


def test_usage_window_keeps_one_minute():
    windows = UsageWindows()
    for second in range(1000):
        windows.take(UsageLimits(), Ask(requests=1, tokens=1), float(second))
    assert len(windows._requests.taken) <= WINDOW_S + 1
    windows.forget(2000.0)
    assert windows.idle
