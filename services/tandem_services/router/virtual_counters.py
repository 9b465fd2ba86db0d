"""Virtual token counters: who has had how much of the fleet (VTC; Sheng et al., "Fairness in Serving Large Language
Models", OSDI'24). Pure.

Each tenant has a counter of the work done for it, divided by its weight. Of those that wait, the one with the least
goes first, so none that waits gets less than another by more than what a few requests cost. A tenant that comes back
starts where the others are: what it left unused while it was away is not saved up.

    arrives   it had nothing waiting: raised to the least of those that wait, or to where the last one left
    charged   prompt tokens when they are computed, output tokens as they come
    leaves    nothing of it waits any more

`scripts/fair.lua` is the same for all gateways together; this is what one gateway decides by between two reports, and
while Redis is away. A counter that a tenant would be raised above on its return is forgotten, which bounds the memory.
"""

from dataclasses import dataclass, field

MAX_TENANTS = 4_096
"""More counters than this are rubbish, or of a deployment that has more keys than fit into a key file."""

UNCACHED_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
"""An output token takes a step of its own; the paper's weights."""
CACHED_WEIGHT = 0.1
"""A prompt token found in a prefix cache costs memory, not computation."""


def prompt_cost(prompt_tokens: int, cached_tokens: int) -> float:
    """Virtual tokens of a prompt of which so many tokens are cached."""
    cached = min(max(cached_tokens, 0), prompt_tokens)
    return UNCACHED_WEIGHT * (prompt_tokens - cached) + CACHED_WEIGHT * cached


@dataclass(kw_only=True, slots=True)
class VirtualCounters:
    """Belongs to one event loop."""

    floor: float = 0.0
    """Where the last tenant left."""
    _values: dict[str, float] = field(default_factory=dict)
    _backlogged: set[str] = field(default_factory=set)

    def value(self, tenant: str) -> float:
        return self._values.get(tenant, self.floor)

    @property
    def backlogged(self) -> frozenset[str]:
        """Tenants with something waiting."""
        return frozenset(self._backlogged)

    def arrive(self, tenant: str) -> None:
        """A request of it waits from now on. Does nothing when one waits already."""
        if tenant in self._backlogged:
            return
        self._values[tenant] = max(self.value(tenant), self._level())
        self._backlogged.add(tenant)

    def charge(self, tenant: str, cost: float) -> None:
        """`cost`: virtual tokens over its weight; below 0 takes back what was charged too much."""
        self._values[tenant] = self.value(tenant) + cost

    def leave(self, tenant: str) -> None:
        """Nothing of it waits any more."""
        self._backlogged.discard(tenant)
        if not self._backlogged:
            self.floor = max(self.floor, self.value(tenant))
            self._forget()

    def adopt(self, values: dict[str, float], floor: float) -> None:
        """What all gateways together have counted."""
        self._values.update(values)
        self.floor = floor
        self._forget()

    def _level(self) -> float:
        return min((self.value(tenant) for tenant in self._backlogged), default=self.floor)

    def _forget(self) -> None:
        keep = self._backlogged
        self._values = {name: value for name, value in self._values.items() if name in keep or value > self.floor}
