"""Division of the memory, and the error when it is too small."""

from dataclasses import replace

import pytest

from tandem_engine.base.errors import ConfigError
from tandem_engine.config import CacheConfig, HostConfig
from tandem_engine.memory.sizing import GIB, HostShare, MemoryFacts, plan_memory

MIB = 1 << 20


def facts(*, total=10 * GIB, available=9 * GIB, used=2 * GIB, weights=1 * GIB, activations=GIB) -> MemoryFacts:
    return MemoryFacts(total=total, available=available, used=used, weights=weights, activations=activations)


def plan(cache: CacheConfig, measured: MemoryFacts, *, context_length: int = 4096, beside_pool: bool = True):
    host = HostShare(config=cache.host, page_bytes=MIB, beside_pool=beside_pool)
    return plan_memory(cache, measured, page_bytes=MIB, context_length=context_length, host=host)


def host(*, ratio: float = 2.0, size: int = 0, swap: int = 0, cache: bool = True) -> HostConfig:
    return HostConfig(enable_cache=cache, ratio=ratio, size_bytes=size, swap_bytes=swap)


def test_kv_pages_get_share_minus_weights_and_activations():
    made = plan(CacheConfig(mem_fraction_static=0.5), facts())
    assert made.pages == 5 * 1024 - 2 * 1024 - 1024


def test_others_use_of_the_machine_limits_the_share():
    made = plan(CacheConfig(mem_fraction_static=0.9), facts(available=3 * GIB))
    assert made.pages == 2 * 1024


@pytest.mark.parametrize(
    ("below", "pages"),
    [
        (host(size=GIB), 1024),
        (host(cache=False, swap=GIB), 1024),
        (host(size=GIB // 2, swap=GIB), 512),
        # Every page of the pool brings so many of the host with it.
        (host(ratio=1.0), 1024),
        (host(ratio=3.0, swap=GIB), 256),
    ],
)
def test_host_memory_next_to_the_pool_is_counted(below, pages):
    made = plan(CacheConfig(mem_fraction_static=0.5, host=below), facts(), context_length=2048)
    assert made.pages == pages
    assert made.kv_bytes + made.host_cache + made.swap == 2 * GIB


def test_host_memory_of_another_device_leaves_the_pool_alone():
    made = plan(CacheConfig(mem_fraction_static=0.5, host=host(size=7 * GIB)), facts(), beside_pool=False)
    assert made.pages == 2 * 1024
    assert str(made).endswith("free 6.00 GiB; of host memory: host cache 7.00 GiB, swap space 0.00 GiB")


def test_draft_that_is_yet_to_be_loaded_is_counted():
    drafting = replace(facts(), draft=GIB // 2)
    made = plan(CacheConfig(mem_fraction_static=0.5), drafting)
    assert made.pages == plan(CacheConfig(mem_fraction_static=0.5), facts()).pages - 512
    assert "draft 0.50 GiB" in str(made)
    with pytest.raises(ConfigError, match=r"draft \(0\.50 GiB\)"):
        plan(CacheConfig(mem_fraction_static=0.36), drafting)


def test_memory_plan_is_one_log_line():
    line = str(plan(CacheConfig(mem_fraction_static=0.5, host=host(size=GIB // 2, swap=GIB // 2)), facts()))
    assert "\n" not in line
    for part in (
        "weights 1.00 GiB",
        "process 1.00 GiB",
        "activations 1.00 GiB",
        "KV 1.00 GiB (1024 pages, 16368 tokens)",
        "host cache 0.50 GiB",
        "swap space 0.50 GiB",
        "free 6.00 GiB",
    ):
        assert part in line


@pytest.mark.parametrize(
    ("fraction", "measured", "advice"),
    [
        # 4096 tokens need 257 MiB.
        (0.32, facts(), "lower --context-length to 3248 or raise --mem-fraction-static to 0.33"),
        (0.1, facts(), "raise --mem-fraction-static to 0.33"),
        (0.9, facts(available=GIB + 100 * MIB), "lower --context-length to 1584"),
        (0.9, facts(available=GIB), "free memory of this machine, or serve a smaller model"),
        (0.98, facts(used=9 * GIB), "free memory of this machine, or serve a smaller model"),
    ],
)
def test_share_too_small_for_one_request_names_sizes_that_fit(fraction, measured, advice):
    with pytest.raises(ConfigError) as refused:
        plan(CacheConfig(mem_fraction_static=fraction), measured)
    text = str(refused.value)
    assert "one request of --context-length 4096 needs 0.25 GiB" in text
    assert text.endswith(f"available: {advice}")


def test_proposed_sizes_are_accepted():
    assert plan(CacheConfig(mem_fraction_static=0.33), facts()).pages >= 257
    assert plan(CacheConfig(mem_fraction_static=0.32), facts(), context_length=3248).pages >= 204


@pytest.mark.parametrize(
    ("cache", "text"),
    [
        (CacheConfig(num_pages=20_000), r"--num-pages 20000 needs 19\.53 GiB .* at most 9216"),
        (CacheConfig(kv_cache_bytes=20 * GIB), r"--kv-cache-gib 20 needs 20\.00 GiB .* at most 9\.00"),
    ],
)
def test_pool_that_the_memory_cannot_hold_is_refused_at_start(cache, text):
    with pytest.raises(ConfigError, match=text):
        plan(cache, facts(activations=None))


def test_explicit_pool_size_is_used_unchanged():
    assert plan(CacheConfig(num_pages=7), facts(activations=None)).pages == 7
    assert plan(CacheConfig(kv_cache_bytes=GIB), facts(activations=None)).pages == 1024
    assert "activations not measured" in str(plan(CacheConfig(), facts(activations=None)))


@pytest.mark.parametrize(
    ("cache", "text", "fitting"),
    [
        (
            CacheConfig(num_pages=4096, host=host()),
            r"--num-pages 4096 needs 4\.00 GiB for KV pages and 8\.00 GiB for host memory \(--hicache-ratio 2\) and "
            r"9\.00 GiB is available: lower it to at most 3072 or lower --hicache-ratio to 1\.25",
            [CacheConfig(num_pages=3072, host=host()), CacheConfig(num_pages=4096, host=host(ratio=1.25))],
        ),
        (
            CacheConfig(kv_cache_bytes=4 * GIB, host=host(size=3 * GIB, swap=3 * GIB)),
            r"at most 3\.00 or ask for at most 5\.00 GiB with --hicache-size 3 and --swap-space 3",
            [
                CacheConfig(kv_cache_bytes=3 * GIB, host=host(size=3 * GIB, swap=3 * GIB)),
                CacheConfig(kv_cache_bytes=4 * GIB, host=host(size=3 * GIB, swap=2 * GIB)),
            ],
        ),
        (
            CacheConfig(kv_cache_bytes=GIB, host=host(cache=False, swap=10 * GIB)),
            r"available: ask for at most 8\.00 GiB with --swap-space 10",
            [CacheConfig(kv_cache_bytes=GIB, host=host(cache=False, swap=8 * GIB))],
        ),
        (
            CacheConfig(mem_fraction_static=0.5, host=host(cache=False, swap=2 * GIB)),
            r"with --swap-space 2; .* raise --mem-fraction-static to 0\.53 or ask for at most 1\.74 GiB",
            [
                CacheConfig(mem_fraction_static=0.53, host=host(cache=False, swap=2 * GIB)),
                CacheConfig(mem_fraction_static=0.5, host=host(cache=False, swap=int(1.74 * GIB))),
            ],
        ),
        (
            CacheConfig(mem_fraction_static=0.5, host=host(ratio=9.0)),
            r"lower --context-length to 3248 or raise --mem-fraction-static to 0\.56 or lower --hicache-ratio to 6\.96",
            [CacheConfig(mem_fraction_static=0.5, host=host(ratio=6.96))],
        ),
    ],
)
def test_host_memory_too_large_for_pool_names_size_that_fits(cache, text, fitting):
    measured = facts() if cache.mem_fraction_static else facts(activations=None)
    with pytest.raises(ConfigError, match=text):
        plan(cache, measured)
    for accepted in fitting:
        assert plan(accepted, measured).pages > 1


def test_graph_memory_is_added_to_largest_step():
    cache = CacheConfig(mem_fraction_static=0.8)
    without = plan(cache, facts())
    graphs = replace(facts(), graphs=GIB)
    assert without.pages - plan(cache, graphs).pages == GIB // without.page_bytes
    assert "graphs 1.00 GiB" in str(plan(cache, graphs))
    with pytest.raises(ConfigError, match=r"graphs \(6.00 GiB\) and steps \(1.00 GiB\)"):
        plan(cache, replace(facts(), graphs=6 * GIB))


def test_default_pool_shrinks_to_available_memory():
    made = plan(CacheConfig(), replace(facts(available=600 * MIB, activations=100 * MIB), kept=160 * MIB))
    assert made.pages == 340
    assert str(made).endswith(
        "free 0.00 GiB. The pool is smaller than the default of 0.50 GiB, because no more memory is available"
    )


def test_default_pool_with_room_keeps_its_size():
    made = plan(CacheConfig(), facts(activations=None))
    assert (made.pages, made.default_pages) == (512, 0)
    assert plan(CacheConfig(), replace(facts(), kept=160 * MIB)).pages == 512


def test_default_pool_too_small_names_fitting_context_length():
    short = replace(facts(available=400 * MIB, total=GIB, activations=100 * MIB), kept=160 * MIB)
    with pytest.raises(ConfigError) as raised:
        plan(CacheConfig(), short)
    assert str(raised.value) == (
        "one request of --context-length 4096 needs 0.25 GiB of KV pages, and 0.39 GiB of 1.00 GiB is available, of "
        "which steps take 0.25 GiB: lower --context-length to 2224 or provide more memory"
    )
    assert plan(CacheConfig(), short, context_length=2224).pages == 140


RING = 256 * MIB


def test_device_keeps_memory_for_ring_of_packed_pages():
    cache = CacheConfig(mem_fraction_static=0.5)
    without, made = (plan(cache, replace(facts(), ring=ring), beside_pool=False) for ring in (0, RING))
    assert without.pages - made.pages == 256
    assert "packed pages 0.25 GiB, KV " in str(made)
    assert "packed pages" not in str(without)
    with pytest.raises(ConfigError, match=r"process \(2\.00 GiB\), packed pages \(0\.25 GiB\) and steps"):
        plan(CacheConfig(mem_fraction_static=0.33), replace(facts(), ring=RING), beside_pool=False)


@pytest.mark.parametrize(
    ("cache", "smallest"),
    [
        # 4096 tokens need 257 MiB; a given size is taken as it is.
        (CacheConfig(mem_fraction_static=0.9), 257),
        (CacheConfig(), 257),
        (CacheConfig(num_pages=500), 500),
        (CacheConfig(kv_cache_bytes=500 * MIB), 500),
    ],
)
def test_ring_of_packed_pages_on_cpu_yields_to_smallest_pool(cache, smallest):
    """A worker that starts without peers of other sizes starts with them."""
    activations = None if cache.num_pages or cache.kv_cache_bytes else 100 * MIB
    for beside, counted in ((0, 0), (100, 100), (256, 256)):
        available = (0 if activations is None else activations) + (smallest + beside) * MIB
        made = plan(cache, replace(facts(available=available, activations=activations), ring=RING))
        assert (made.pages, made.facts.ring) == (smallest, counted * MIB)
        assert str(made).count("free 0.00 GiB") == 1
        assert ("packed pages 0.10 GiB of 0.25 GiB" in str(made)) == (beside == 100)


@pytest.mark.parametrize(
    ("cache", "text", "fitting"),
    [
        (CacheConfig(num_pages=800), "--num-pages 800 .* lower it to at most 499$", CacheConfig(num_pages=499)),
        (
            CacheConfig(kv_cache_bytes=GIB),
            "--kv-cache-gib 1 .* set it to at most 0.48$",
            CacheConfig(kv_cache_bytes=int(0.48 * GIB)),
        ),
    ],
)
def test_given_pool_size_leaves_room_for_what_serving_takes(cache, text, fitting):
    """On a device; regression: only pages and host memory were counted, and the ring or a draft found none left."""
    short = replace(facts(available=GIB, activations=None), ring=RING, draft=269 * MIB)
    with pytest.raises(ConfigError, match=text) as refused:
        plan(cache, short, beside_pool=False)
    serving = "1.00 GiB is available, of which serving takes 0.51 GiB: steps (0.00 GiB), draft (0.26 GiB), packed pages"
    assert serving in str(refused.value)
    assert plan(fitting, short, beside_pool=False).pages <= 499


def test_given_pool_size_without_any_fitting_names_memory():
    with pytest.raises(ConfigError, match="0.00 GiB is available: free memory of this machine, or serve a smaller"):
        plan(CacheConfig(num_pages=20), facts(available=MIB, activations=None))
