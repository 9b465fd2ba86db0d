"""Counters and histograms as numbers: the exposition is that of prometheus_client."""

import random
import time

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tandem_services.common.metric_values import CounterFamily, HistogramFamily, LevelFamily
from tandem_services.common.metrics import REQUEST_SECONDS

BOUNDS = (0.0, *REQUEST_SECONDS)
LABELS = ("model_name", "code")


@pytest.fixture(autouse=True)
def stopped_time(monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1700000000.25)


def test_observations_have_the_bytes_of_prometheus():
    ours, theirs = CollectorRegistry(auto_describe=True), CollectorRegistry(auto_describe=True)
    histogram = HistogramFamily("waits_seconds", "Of all", LABELS, ours, buckets=BOUNDS)
    other = Histogram("waits_seconds", "Of all", LABELS, registry=theirs, buckets=BOUNDS)
    assert generate_latest(ours) == generate_latest(theirs)
    drawn = random.Random(7)
    values = [*BOUNDS, -1.0, 1e6, float("inf"), *(drawn.uniform(-1.0, 700.0) for _ in range(200))]
    for value in values:
        for model in ("m", 'n"\\\n'):
            histogram.series(model, "200").observe(value)
            other.labels(model_name=model, code="200").observe(value)
        assert generate_latest(ours) == generate_latest(theirs)


def test_counts_have_the_bytes_of_prometheus():
    ours, theirs = CollectorRegistry(auto_describe=True), CollectorRegistry(auto_describe=True)
    counter = CounterFamily("answers", "Of all", LABELS, ours)
    other = Counter("answers", "Of all", LABELS, registry=theirs)
    assert generate_latest(ours) == generate_latest(theirs)
    for code, amount in (("200", 1), ("503", 0), ("200", 10**9), ("499", 0.5), ("503", 3)):
        counter.series("m", code).inc(amount)
        other.labels(model_name="m", code=code).inc(amount)
        assert generate_latest(ours) == generate_latest(theirs)


def test_levels_have_the_bytes_of_prometheus():
    ours, theirs = CollectorRegistry(auto_describe=True), CollectorRegistry(auto_describe=True)
    level = LevelFamily("running", "Now", LABELS, ours)
    other = Gauge("running", "Now", LABELS, registry=theirs)
    assert generate_latest(ours) == generate_latest(theirs)
    for code, amount in (("200", 1), ("503", 0), ("200", 2), ("200", -3), ("499", 0.5)):
        level.series("m", code).value += amount
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
