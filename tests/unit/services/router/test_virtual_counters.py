"""Virtual token counters: no tenant saves up what it did not use, and none is punished for having been alone."""

from tandem_services.router.usage_counters import (
    CACHED_WEIGHT,
    OUTPUT_WEIGHT,
    UNCACHED_WEIGHT,
    VirtualCounters,
    prompt_cost,
)


def test_cached_tokens_cost_less_than_computed_and_output_more():
    assert CACHED_WEIGHT < UNCACHED_WEIGHT < OUTPUT_WEIGHT
    assert prompt_cost(100, 0) == 100
    assert prompt_cost(100, 90) == 10 + 9
    # A prediction may be of more tokens than there are.
    assert prompt_cost(100, 500) == prompt_cost(100, 100)


def test_returning_tenant_starts_at_min_active_counter():
    counters = VirtualCounters()
    counters.arrive("busy")
    counters.charge("busy", 1000)
    counters.arrive("late")
    assert counters.value("late") == 1000


def test_tenant_at_empty_queue_starts_at_last_counter():
    counters = VirtualCounters()
    counters.arrive("alone")
    counters.charge("alone", 500)
    counters.leave("alone")
    counters.arrive("next")
    assert counters.value("next") == 500


def test_tenant_counter_is_kept_while_others_wait():
    counters = VirtualCounters()
    counters.arrive("a")
    counters.arrive("b")
    counters.charge("a", 300)
    counters.leave("a")
    counters.arrive("a")
    assert (counters.value("a"), counters.value("b")) == (300, 0)


def test_arriving_twice_is_arriving_once():
    counters = VirtualCounters()
    counters.arrive("a")
    counters.arrive("b")
    counters.charge("b", 10)
    counters.arrive("a")
    assert counters.value("a") == 0


def test_idle_tenants_are_forgotten_without_a_trace():
    counters = VirtualCounters()
    for number in range(10_000):
        counters.arrive(f"t{number}")
        counters.charge(f"t{number}", 1)
        counters.leave(f"t{number}")
    assert len(counters._values) == 0
    assert counters.value("t0") == counters.floor == 10_000
