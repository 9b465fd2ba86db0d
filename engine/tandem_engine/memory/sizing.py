"""How many KV pages an engine gets, and where its memory goes.

    --num-pages            so many
    --kv-cache-gib         as many as fit in so much
    --mem-fraction-static  what is left of this share of the device's memory after weights and the largest step
    none of them           `DEFAULT_KV_BYTES`, which any machine has

Whatever decides, pages that the memory cannot hold are refused at start, with the figure that would fit.
"""

from dataclasses import dataclass
from math import ceil

from tandem_engine.config import CacheConfig
from tandem_engine.errors import ConfigError

GIB = 1 << 30
LARGEST_FRACTION = 0.98
"""Nothing above is ever proposed: the rest of the machine needs some."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryFacts:
    """Bytes, measured once the weights are loaded."""

    total: int
    """Of the device, or what the process may have of it."""
    available: int
    """Not taken by anybody."""
    used: int
    """By this process, weights included."""
    weights: int
    activations: int | None
    """Peak of the largest step; None when it was not measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """What goes where."""

    facts: MemoryFacts
    pages: int
    page_bytes: int
    page_size: int
    host_cache: int = 0

    @property
    def kv_bytes(self) -> int:
        return self.pages * self.page_bytes

    def __str__(self) -> str:
        """The one line that says it all."""
        facts = self.facts
        activations = "not measured" if facts.activations is None else _gib(facts.activations)
        free = facts.available - self.kv_bytes - (facts.activations or 0) - self.host_cache
        return (
            f"memory {_gib(facts.total)}: weights {_gib(facts.weights)}, process {_gib(facts.used - facts.weights)}, "
            f"activations {activations}, KV {_gib(self.kv_bytes)} ({self.pages} pages, "
            f"{(self.pages - 1) * self.page_size} tokens), host cache {_gib(self.host_cache)}, free {_gib(free)}"
        )


def plan_memory(
    cache: CacheConfig, facts: MemoryFacts, *, page_bytes: int, context_length: int, host_cache: int = 0
) -> MemoryPlan:
    """Decide the number of pages, dummy page included.

    Raises:
        ConfigError: they do not fit, or with a fraction not even one request of `context_length` does; the
            message says what would.
    """
    if cache.mem_fraction_static:
        pages = _from_fraction(cache, facts, page_bytes, context_length, host_cache)
    else:
        pages = cache.pages_for(page_bytes)
        _require_available(cache, facts, pages, page_bytes)
    return MemoryPlan(facts=facts, pages=pages, page_bytes=page_bytes, page_size=cache.page_size, host_cache=host_cache)


def _require_available(cache: CacheConfig, facts: MemoryFacts, pages: int, page_bytes: int) -> None:
    if pages * page_bytes <= facts.available:
        return
    if cache.num_pages:
        flag, fix = f"--num-pages {pages}", f"lower it to at most {facts.available // page_bytes}"
    else:
        flag = f"--kv-cache-gib {cache.kv_bytes / GIB:g}"
        fix = f"set it to at most {facts.available / GIB:.2f}"
    raise ConfigError(
        f"{flag} needs {_gib(pages * page_bytes)} for KV pages and {_gib(facts.available)} is available: {fix}"
    )


def _from_fraction(
    cache: CacheConfig, facts: MemoryFacts, page_bytes: int, context_length: int, host_cache: int
) -> int:
    assert facts.activations is not None, "a fraction is divided by measurement"
    fraction = cache.mem_fraction_static
    fixed = facts.used + facts.activations + host_cache
    # Others may have taken what this share promises.
    left = min(int(facts.total * fraction) - fixed, facts.available - facts.activations - host_cache)
    needed = (ceil(context_length / cache.page_size) + 1) * page_bytes
    if left >= needed:
        return left // page_bytes
    fitting = max(0, left // page_bytes - 1) * cache.page_size
    fixes = [f"lower --context-length to {fitting}"] if fitting else []
    enough = ceil((fixed + needed) / facts.total * 100) / 100
    if fraction < enough <= LARGEST_FRACTION:
        fixes.append(f"raise --mem-fraction-static to {enough:g}")
    if not fixes:
        fixes = ["free memory of this machine, or serve a smaller model"]
    raise ConfigError(
        f"one request of --context-length {context_length} needs {_gib(needed)} of KV pages; --mem-fraction-static "
        f"{fraction:g} of {_gib(facts.total)} leaves {_gib(max(0, left))} after weights and process "
        f"({_gib(facts.used)}) and the largest step ({_gib(facts.activations)}), with {_gib(facts.available)} "
        f"available: {' or '.join(fixes)}"
    )


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
