"""All scenarios there are, by number."""

from types import ModuleType

from tandem_testing.chaos.families import (
    adapters,
    adapters_on_demand,
    addresses,
    cells,
    clients,
    crashes,
    drains,
    endurance,
    exceptions,
    freezes,
    identities,
    membership,
    networks,
    outages,
    partitions,
    redis_faults,
    rented_redis,
    steps,
    transfers,
)
from tandem_testing.chaos.scenario import Scenario

FAMILIES: tuple[ModuleType, ...] = (
    crashes,
    transfers,
    freezes,
    outages,
    clients,
    redis_faults,
    rented_redis,
    cells,
    networks,
    partitions,
    membership,
    addresses,
    steps,
    drains,
    identities,
    adapters,
    adapters_on_demand,
    exceptions,
    endurance,
)


def scenarios() -> dict[int, Scenario]:
    """Raises `AssertionError` when two test one promise."""
    found: dict[int, Scenario] = {}
    for family in FAMILIES:
        for value in vars(family).values():
            if isinstance(value, Scenario):
                number = value.promise.number
                assert number not in found, f"scenario {number} is tested twice"
                found[number] = value
    return dict(sorted(found.items()))


def of_family(name: str) -> list[int]:
    """Numbers of the scenarios of `families.NAME`, and of `families.NAME_…`. None where there is no such module."""
    own = [each for each in FAMILIES if f"{each.__name__.rpartition('.')[2]}_".startswith(f"{name}_")]
    return sorted(value.promise.number for each in own for value in vars(each).values() if isinstance(value, Scenario))
