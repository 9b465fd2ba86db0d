"""One exposition of several processes: sums, greatest values, and counts of those that have ended."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tandem_services.gateway.processes.metric_sums import MetricSums


def exposition(*, requests: float, running: float, release: float, seconds: float) -> bytes:
    registry = CollectorRegistry()
    Counter("requests", "answered", ["code"], registry=registry).labels("200").inc(requests)
    Gauge("running", "now", registry=registry).set(running)
    Gauge("tandem_release", "of the process", registry=registry).set(release)
    Histogram("wait_seconds", "waited", registry=registry, buckets=(1.0, 2.0)).observe(seconds)
    return generate_latest(registry)


def values(sums: MetricSums) -> dict[str, float]:
    families = text_string_to_metric_families(sums.exposition().decode())
    return {
        sample.name + "".join(f"|{value}" for value in sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def two() -> MetricSums:
    sums = MetricSums()
    sums.scraped(0, exposition(requests=3, running=2, release=7, seconds=0.5), life=0)
    sums.scraped(1, exposition(requests=4, running=1, release=7, seconds=1.5), life=0)
    return sums


def test_counters_histograms_and_gauges_are_summed():
    assert values(two()) == {
        "requests_total|200": 7,
        "running": 3,
        "tandem_release": 7,
        "wait_seconds_bucket|1.0": 1,
        "wait_seconds_bucket|2.0": 2,
        "wait_seconds_bucket|+Inf": 2,
        "wait_seconds_count": 2,
        "wait_seconds_sum": 2.0,
    }


def test_exposition_of_one_process_is_its_own():
    alone = exposition(requests=3, running=2, release=7, seconds=0.5)
    sums = MetricSums()
    sums.scraped(0, alone, life=0)
    text = sums.exposition().decode()
    assert {line for line in alone.decode().splitlines() if not line.startswith("#")} == {
        line for line in text.splitlines() if not line.startswith("#")
    }


def test_counts_of_ended_processes_stay_and_their_gauges_go():
    sums = two()
    sums.ended(1)
    left = values(sums)
    assert (left["requests_total|200"], left["running"], left["wait_seconds_count"]) == (7, 2, 2)
    sums.scraped(1, exposition(requests=1, running=5, release=7, seconds=3.0), life=sums.life_of(1))
    left = values(sums)
    assert (left["requests_total|200"], left["running"], left["wait_seconds_count"]) == (8, 7, 3)
    sums.ended(1)
    sums.ended(0)
    assert values(sums)["requests_total|200"] == 8


def test_end_of_a_process_that_was_never_scraped_does_not_change_the_sums():
    sums = two()
    sums.ended(5)
    assert values(sums)["requests_total|200"] == 7


def test_scrape_of_a_process_that_ended_during_it_is_dropped():
    sums = two()
    life = sums.life_of(1)
    sums.ended(1)
    sums.scraped(1, exposition(requests=9, running=9, release=7, seconds=0.5), life=life)
    assert values(sums)["requests_total|200"] == 7


def test_quarantine_that_all_processes_know_counts_once():
    name, sums = "tandem_gateway_quarantined_requests", MetricSums()
    for number in range(2):
        sums.scraped(number, f"# TYPE {name} gauge\n{name} 3.0\n".encode(), life=0)
    assert values(sums) == {name: 3}
