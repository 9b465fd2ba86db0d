"""How many KV pages an engine gets, and where its memory goes.

    --num-pages            this number
    --kv-cache-gib         as many as fit in this size
    --mem-fraction-static  what is left of this share of the device's memory after weights and the largest step
    none of them           `DEFAULT_KV_BYTES`; less where the available memory leaves less after the largest step

On a CPU, host memory for KV (the host tier of the prefix cache, and swap space) is in the same memory as the pool, and
is subtracted too. With `--hicache-ratio` it grows with the pool, so a page of the pool costs more than its own bytes.

The ring of packed pages (`disaggregation.packed_pages`) is made when a peer of another number of ranks first needs it.
Memory of a device is left for it. On a CPU it gets what the smallest pool leaves, for handoffs work without it, in more
ranges: memory in which an engine can serve alone is enough to start.

Pages that the memory cannot hold are rejected at start; the error has the number that would fit.
"""

from dataclasses import dataclass, replace
from math import ceil, floor

from tandem_engine.base.errors import ConfigError
from tandem_engine.config import CacheConfig, HostConfig

GIB = 1 << 30

MAX_FRACTION = 0.98
"""Nothing above is ever proposed: the rest of the machine needs some."""

NO_FIX = "free memory of this machine, or serve a smaller model"
"""When no value of a flag would do."""

MIN_POOL = 2
"""Pages, the dummy one included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryFacts:
    """Bytes, measured once the weights are loaded."""

    total: int
    """Of the device, or what the process may have of it."""
    available: int
    """Memory that no process uses."""
    used: int
    """By this process, weights included."""
    weights: int
    activations: int | None
    """Peak of the largest step; None when it was not measured."""
    graphs: int = 0
    """Of captured steps, which stay allocated next to the weights; 0 without any, or when it was not measured."""
    draft: int = 0
    """Of a draft model's weights, which are loaded when the pool is there."""
    drafted: int = 0
    """Of what layers with states keep of a step with drafts."""
    kept: int = 0
    """What steps leave allocated beyond `used`."""
    ring: int = 0
    """Of the ring of packed pages; 0 without peers that may need it."""

    @property
    def beside_pool(self) -> int:
        """What serving takes beyond `used` and pages."""
        return (self.activations or 0) + self.graphs + self.draft + self.drafted + self.kept + self.ring

    @property
    def named_beside_pool(self) -> str:
        """The same by what it is for, but steps and what they leave: for errors."""
        named = (("graphs", self.graphs), ("draft", self.draft), ("packed pages", self.ring))
        return "".join(f", {name} ({_gib(size)})" for name, size in named if size)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostShare:
    """Host memory for KV: how much goes with a pool of so many pages."""

    config: HostConfig
    page_bytes: int
    """Of one host page; a draft model's share of a page is not kept there."""
    beside_pool: bool
    """Whether it comes out of the memory that the pool lies in."""

    def cache_bytes(self, pages: int) -> int:
        return self.config.cache_pages(device_pages=pages, page_bytes=self.page_bytes) * self.page_bytes

    @property
    def swap_bytes(self) -> int:
        return self.config.swap_pages(self.page_bytes) * self.page_bytes

    @property
    def fixed(self) -> int:
        """Bytes outside the pool that do not depend on its size."""
        if not self.beside_pool:
            return 0
        return self.swap_bytes + (self.cache_bytes(0) if self.config.enable_cache and not self._by_ratio else 0)

    @property
    def per_page(self) -> float:
        """Bytes outside the pool for each page of it."""
        return self.config.ratio * self.page_bytes if self.beside_pool and self._by_ratio else 0.0

    @property
    def counts(self) -> bool:
        """Whether the pool has less room because of it."""
        return self.beside_pool and self.config.enabled

    @property
    def flags(self) -> str:
        """The flag that requests it, as it was given."""
        config, given = self.config, []
        if config.enable_cache:
            given.append(
                f"--hicache-ratio {config.ratio:g}" if self._by_ratio else f"--hicache-size {config.size_bytes / GIB:g}"
            )
        if config.swap_bytes:
            given.append(f"--swap-space {config.swap_bytes / GIB:g}")
        return " and ".join(given)

    @property
    def _by_ratio(self) -> bool:
        return self.config.enable_cache and not self.config.size_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """What goes where."""

    facts: MemoryFacts
    pages: int
    page_bytes: int
    page_size: int
    host_cache: int = 0
    swap: int = 0
    """Host memory for swapped requests."""
    beside_pool: bool = True
    """Whether host memory is the memory that the pool lies in."""
    default_pages: int = 0
    """Pages of the default size, where the memory is too small for it; else 0."""
    whole_ring: int = 0
    """Bytes of the ring of packed pages, where the memory has fewer for it (`MemoryFacts.ring`); else 0."""

    @property
    def kv_bytes(self) -> int:
        return self.pages * self.page_bytes

    @property
    def free(self) -> int:
        """What is left of the available memory when all of the plan is taken."""
        host = self.host_cache + self.swap if self.beside_pool else 0
        return self.facts.available - self.kv_bytes - self.facts.beside_pool - host

    def __str__(self) -> str:
        """The plan in one line, for the log."""
        facts = self.facts
        activations = "not measured" if facts.activations is None else _gib(facts.activations)
        below = f"host cache {_gib(self.host_cache)}, swap space {_gib(self.swap)}"
        graphs = f"graphs {_gib(facts.graphs)}, " if facts.graphs else ""
        draft = f"draft {_gib(facts.draft)}, " if facts.draft else ""
        drafted = f"states of drafts {_gib(facts.drafted)}, " if facts.drafted else ""
        of_ring = f" of {_gib(self.whole_ring)}" if self.whole_ring else ""
        ring = f"packed pages {_gib(facts.ring)}{of_ring}, " if facts.ring or of_ring else ""
        ours = (
            f"memory {_gib(facts.total)}: weights {_gib(facts.weights)}, process {_gib(facts.used - facts.weights)}, "
            f"activations {activations}, {graphs}{draft}{drafted}{ring}KV {_gib(self.kv_bytes)} ({self.pages} pages, "
            f"{(self.pages - 1) * self.page_size} tokens)"
        )
        if self.beside_pool:
            ours = f"{ours}, {below}, free {_gib(self.free)}"
        else:
            ours = f"{ours}, free {_gib(self.free)}; of host memory: {below}"
        if not self.default_pages:
            return ours
        default = _gib(self.default_pages * self.page_bytes)
        return f"{ours}. The pool is smaller than the default of {default}, because no more memory is available"


def plan_memory(
    cache: CacheConfig, facts: MemoryFacts, *, page_bytes: int, context_length: int, host: HostShare
) -> MemoryPlan:
    """Decide the number of pages, dummy page included.

    Raises:
        ConfigError: they do not fit next to the requested host memory, or with a fraction not even one request
            of `context_length` does; the message says what would.
    """
    whole_ring = facts.ring
    if whole_ring and host.beside_pool:
        without = replace(facts, ring=0)
        left = _left(cache, without, host) - _least_bytes(cache, without, page_bytes, context_length, host)
        facts = replace(facts, ring=min(whole_ring, max(0, left)))
    if cache.mem_fraction_static:
        pages = default = _from_fraction(cache, facts, page_bytes, context_length, host)
    else:
        pages = cache.pages_for(page_bytes)
        if cache.is_default_size and facts.activations is not None:
            default, pages = pages, min(pages, _fitting(cache, facts, page_bytes, context_length, host))
        else:
            default = pages
            _require_available(cache, facts, pages, page_bytes, host)
    return MemoryPlan(
        facts=facts,
        pages=pages,
        page_bytes=page_bytes,
        page_size=cache.page_size,
        host_cache=host.cache_bytes(pages),
        swap=host.swap_bytes,
        beside_pool=host.beside_pool,
        default_pages=default if pages < default else 0,
        whole_ring=whole_ring if facts.ring < whole_ring else 0,
    )


def _left(cache: CacheConfig, facts: MemoryFacts, host: HostShare) -> int:
    """Bytes for pages, and for host memory that grows with them."""
    beside = facts.beside_pool + host.fixed
    left = facts.available - beside
    if not cache.mem_fraction_static:
        return left
    # Others may have taken what this share promises.
    return min(int(facts.total * cache.mem_fraction_static) - facts.used - beside, left)


def _least_bytes(cache: CacheConfig, facts: MemoryFacts, page_bytes: int, context_length: int, host: HostShare) -> int:
    """Of the smallest pool that is accepted: for one request, or of a size that is taken as it is."""
    shrinks = cache.mem_fraction_static or (cache.is_default_size and facts.activations is not None)
    pages = _least_pages(cache, context_length) if shrinks else cache.pages_for(page_bytes)
    return ceil(pages * (page_bytes + host.per_page))


def _fitting(cache: CacheConfig, facts: MemoryFacts, page_bytes: int, context_length: int, host: HostShare) -> int:
    """Pages that the available memory can hold next to the largest step."""
    cost, least = page_bytes + host.per_page, _least_pages(cache, context_length)
    left = _left(cache, facts, host)
    if left >= least * cost:
        return int(left // cost)
    fitting = max(0, int(left // cost) - 1) * cache.page_size
    fixes = [f"lower --context-length to {fitting}"] if fitting else []
    fixes += _less_host_memory(host, left + host.fixed - least * page_bytes, least)
    raise ConfigError(
        f"one request of --context-length {context_length} needs {_gib(ceil(least * cost))} of KV pages, and "
        f"{_gib(facts.available)} of {_gib(facts.total)} is available, of which steps take {_gib(facts.beside_pool)}: "
        f"{' or '.join([*fixes, 'provide more memory'])}"
    )


def _least_pages(cache: CacheConfig, context_length: int) -> int:
    """Of one request, and the dummy page."""
    return ceil(context_length / cache.page_size) + 1


def _require_available(cache: CacheConfig, facts: MemoryFacts, pages: int, page_bytes: int, host: HostShare) -> None:
    cost, left = page_bytes + host.per_page, _left(cache, facts, host)
    for_pages = ceil(pages * cost)
    if for_pages <= left:
        return
    fitting = floor(left / cost)
    flag = f"--num-pages {pages}" if cache.num_pages else f"--kv-cache-gib {cache.kv_bytes / GIB:g}"
    fixes = _less_host_memory(host, left + host.fixed - pages * page_bytes, pages)
    gib = _floor(fitting * page_bytes / GIB)
    if fitting >= MIN_POOL and (cache.num_pages or gib):
        fixes.insert(0, f"lower it to at most {fitting}" if cache.num_pages else f"set it to at most {gib:.2f}")
    for_host = for_pages + host.fixed - pages * page_bytes
    beside = f" and {_gib(for_host)} for host memory ({host.flags})" if host.counts else ""
    steps = facts.beside_pool - facts.graphs - facts.draft - facts.ring
    serving = f", of which serving takes {_gib(facts.beside_pool)}: steps ({_gib(steps)}){facts.named_beside_pool}"
    raise ConfigError(
        f"{flag} needs {_gib(pages * page_bytes)} for KV pages{beside} and {_gib(facts.available)} is available"
        f"{serving if facts.beside_pool else ''}: {' or '.join(fixes or [NO_FIX])}"
    )


def _from_fraction(
    cache: CacheConfig, facts: MemoryFacts, page_bytes: int, context_length: int, host: HostShare
) -> int:
    assert facts.activations is not None, "a fraction is divided by measurement"
    fraction, cost = cache.mem_fraction_static, page_bytes + host.per_page
    fixed, left = facts.used + facts.beside_pool + host.fixed, _left(cache, facts, host)
    least = _least_pages(cache, context_length)
    needed = ceil(least * cost)
    if left >= needed:
        return int(left // cost)
    fitting = max(0, int(left // cost) - 1) * cache.page_size
    fixes = [f"lower --context-length to {fitting}"] if fitting else []
    enough = ceil((fixed + needed) / facts.total * 100) / 100
    if fraction < enough <= MAX_FRACTION:
        fixes.append(f"raise --mem-fraction-static to {enough:g}")
    fixes += _less_host_memory(host, left + host.fixed - least * page_bytes, least)
    with_host = f" with {host.flags}" if host.counts else ""
    steps = facts.activations + facts.drafted + facts.kept
    raise ConfigError(
        f"one request of --context-length {context_length} needs {_gib(needed)} of KV pages{with_host}; "
        f"--mem-fraction-static {fraction:g} of {_gib(facts.total)} leaves {_gib(max(0, left))} after weights and "
        f"process ({_gib(facts.used)}){facts.named_beside_pool} and steps ({_gib(steps)})"
        f"{f' and fixed host memory ({_gib(host.fixed)})' if host.fixed else ''}, with {_gib(facts.available)} "
        f"available: {' or '.join(fixes or [NO_FIX])}"
    )


def _less_host_memory(host: HostShare, left: int, pages: int) -> list[str]:
    """The host memory to request instead, where a pool of `pages` leaves `left` bytes for it."""
    if not host.counts or left < 0:
        return []
    ratio = _floor((left - host.fixed) / (pages * host.page_bytes))
    if host.per_page and ratio > 0:
        return [f"lower --hicache-ratio to {ratio:g}"]
    if host.per_page or not _floor(left / GIB):
        return [f"drop {host.flags}"]
    return [f"ask for at most {_floor(left / GIB):.2f} GiB with {host.flags}"]


def _floor(value: float) -> float:
    """Two decimals, never more than `value`: what is proposed must be accepted."""
    return floor(value * 100) / 100


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
