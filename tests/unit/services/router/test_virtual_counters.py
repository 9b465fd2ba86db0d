"""Virtual token counters: no tenant saves up what it did not use, and none is punished for having been alone."""

from collections import Counter
from random import Random

import pytest

from tandem_services.router.usage_counters import (
    CACHED_WEIGHT,
    MIN_DELETED,
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
    assert len(counters._values) <= MIN_DELETED
    assert counters.value("t0") == counters.floor == 10_000


class Forgetting(VirtualCounters):
    """Deletes what counts no more whenever the floor may have risen."""

    def _forget(self) -> None:
        self._recent.clear()
        self._delete()


class Defined(Forgetting):
    """Looks at all tenants of the queue for the lowest."""

    def _level(self) -> float:
        return min((self.value(tenant) for tenant in self.backlogged), default=self.floor)


@pytest.mark.parametrize("seed", range(20))
def test_values_are_those_of_the_definition(seed):
    random, pair = Random(seed), (VirtualCounters(), Defined())
    names = [f"t{number}" for number in range(40)]
    for _ in range(2_000):
        act, name, cost = random.randrange(8), random.choice(names), float(random.randint(-30, 60))
        adopted = {each: random.uniform(0.0, 500.0) for each in random.sample(names, 5)}
        for counters in pair:
            if act < 2:
                counters.arrive(name)
            elif act < 4:
                counters.charge(name, cost)
            elif act < 6:
                counters.leave(name)
            elif act == 6 and name not in counters.backlogged:
                counters.pass_by(name)
            elif act == 7 and cost > 50:
                counters.adopt(dict(adopted), counters.floor + cost - 55)
        later, at_once = ({each: counters.value(each) for each in names} for counters in pair)
        assert later == at_once
        assert pair[0].floor == pair[1].floor
        assert pair[0]._level() == pair[1]._level()
        assert len(pair[0]._values) <= 2 * len(names) + MIN_DELETED


def test_leaving_request_deletes_few_of_many_tenant_counters():
    """Each request looked at the counters of all of them."""
    looks = Counter[str]()

    class Looking(VirtualCounters):
        def _delete(self) -> None:
            looks["values"] += len(self._values)
            super()._delete()

    counters = Looking()
    for number in range(4_096):
        counters.charge(f"t{number}", 1e6 + number)
        counters.pass_by("short")
        counters.arrive("other")
        counters.leave("other")
    assert looks["values"] < 4 * 4_096


def test_arrivals_look_at_few_of_many_waiting_tenants():
    """Each one looked at the counters of all that wait."""
    looks = Counter[str]()

    class Values(dict[str, float]):
        def __getitem__(self, tenant: str) -> float:
            looks["values"] += 1
            return super().__getitem__(tenant)

        def get(self, tenant: str, default: float) -> float:
            looks["values"] += 1
            return super().get(tenant, default)

    counters, random = VirtualCounters(_values=Values()), Random(1)
    for number in range(1_024):
        counters.arrive(f"t{number}")
        counters.charge(f"t{number}", random.uniform(0.0, 100.0))
    for _ in range(4_096):
        tenant = f"t{random.randrange(1_024)}"
        counters.charge(tenant, random.uniform(-10.0, 100.0))
        counters.leave(tenant)
        counters.arrive(tenant)
        counters.pass_by("another")
    assert looks["values"] < 16 * 4_096
    assert len(counters._lowest) <= 2 * 1_024 + MIN_DELETED
