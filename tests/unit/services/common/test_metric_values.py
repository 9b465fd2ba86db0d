"""Counters and histograms as numbers: the exposition is that of prometheus_client."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from tandem_services.common.metric_values import CounterFamily, HistogramFamily
from tandem_services.common.metrics import REQUEST_SECONDS

BOUNDS = (0.0, *REQUEST_SECONDS)
LABELS = ("model_name", "code")


@pytest.fixture(autouse=True, scope="module")
def stopped_time():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: 1700000000.25)
        yield


seconds = st.one_of(st.sampled_from(BOUNDS), st.floats(min_value=-1.0, max_value=1e6))


@given(st.lists(st.tuples(st.sampled_from(["m", 'n"\\\n']), seconds)))
def test_observations_have_the_bytes_of_prometheus(observed):
    ours, theirs = CollectorRegistry(auto_describe=True), CollectorRegistry(auto_describe=True)
    histogram = HistogramFamily("waits_seconds", "Of all", LABELS, ours, buckets=BOUNDS)
    other = Histogram("waits_seconds", "Of all", LABELS, registry=theirs, buckets=BOUNDS)
    for model, value in observed:
        histogram.series(model, "200").observe(value)
        other.labels(model_name=model, code="200").observe(value)
    assert generate_latest(ours) == generate_latest(theirs)


@given(st.lists(st.tuples(st.sampled_from(["200", "503"]), st.integers(0, 10**9))))
def test_counts_have_the_bytes_of_prometheus(counted):
    ours, theirs = CollectorRegistry(auto_describe=True), CollectorRegistry(auto_describe=True)
    counter = CounterFamily("answers", "Of all", LABELS, ours)
    other = Counter("answers", "Of all", LABELS, registry=theirs)
    for code, amount in counted:
        counter.series("m", code).inc(amount)
        other.labels(model_name="m", code=code).inc(amount)
    assert generate_latest(ours) == generate_latest(theirs)


def test_name_registered_twice_is_rejected():
    registry = CollectorRegistry(auto_describe=True)
    CounterFamily("answers", "Of all", LABELS, registry)
    with pytest.raises(ValueError, match="answers"):
        Counter("answers", "Of all", LABELS, registry=registry)


def test_series_without_all_labels_is_rejected():
    counter = CounterFamily("answers", "Of all", LABELS, CollectorRegistry())
    with pytest.raises(ValueError, match="model_name"):
        counter.series("m")


def test_counter_that_decreases_is_rejected():
    counter = CounterFamily("answers", "Of all", LABELS, CollectorRegistry()).series("m", "200")
    with pytest.raises(ValueError, match="decrease"):
        counter.inc(-1)
