"""Where the memory goes, and what is said when it does not go around."""

import pytest

from tandem_engine.config import CacheConfig
from tandem_engine.errors import ConfigError
from tandem_engine.memory.sizing import GIB, MemoryFacts, plan_memory

MIB = 1 << 20


def facts(*, total=10 * GIB, available=9 * GIB, used=2 * GIB, weights=1 * GIB, activations=GIB) -> MemoryFacts:
    return MemoryFacts(total=total, available=available, used=used, weights=weights, activations=activations)


def plan(cache: CacheConfig, measured: MemoryFacts, *, context_length: int = 4096, host_cache: int = 0):
    return plan_memory(cache, measured, page_bytes=MIB, context_length=context_length, host_cache=host_cache)


def test_pages_get_what_the_share_leaves_after_weights_and_the_largest_step():
    made = plan(CacheConfig(mem_fraction_static=0.5), facts())
    assert made.pages == 5 * 1024 - 2 * 1024 - 1024


def test_others_use_of_the_machine_limits_the_share():
    made = plan(CacheConfig(mem_fraction_static=0.9), facts(available=3 * GIB))
    assert made.pages == 2 * 1024


def test_a_host_cache_is_taken_off_first():
    made = plan(CacheConfig(mem_fraction_static=0.5), facts(), host_cache=GIB)
    assert made.pages == 1024


def test_one_line_says_what_went_where():
    line = str(plan(CacheConfig(mem_fraction_static=0.5), facts(), host_cache=GIB))
    assert "\n" not in line
    for part in (
        "weights 1.00 GiB",
        "process 1.00 GiB",
        "activations 1.00 GiB",
        "KV 1.00 GiB (1024 pages, 16368 tokens)",
        "host cache 1.00 GiB",
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
def test_a_share_without_room_for_one_request_is_refused_with_what_would_fit(fraction, measured, advice):
    with pytest.raises(ConfigError) as refused:
        plan(CacheConfig(mem_fraction_static=fraction), measured)
    text = str(refused.value)
    assert "one request of --context-length 4096 needs 0.25 GiB" in text
    assert text.endswith(f"available: {advice}")


def test_what_is_proposed_is_accepted():
    assert plan(CacheConfig(mem_fraction_static=0.33), facts()).pages >= 257
    assert plan(CacheConfig(mem_fraction_static=0.32), facts(), context_length=3248).pages >= 204


@pytest.mark.parametrize(
    ("cache", "text"),
    [
        (CacheConfig(num_pages=20_000), r"--num-pages 20000 needs 19\.53 GiB .* at most 9216"),
        (CacheConfig(kv_cache_bytes=20 * GIB), r"--kv-cache-gib 20 needs 20\.00 GiB .* at most 9\.00"),
    ],
)
def test_a_pool_that_the_memory_cannot_hold_is_refused_at_start(cache, text):
    with pytest.raises(ConfigError, match=text):
        plan(cache, facts(activations=None))


def test_a_given_size_is_taken_as_it_is():
    assert plan(CacheConfig(num_pages=7), facts(activations=None)).pages == 7
    assert plan(CacheConfig(kv_cache_bytes=GIB), facts(activations=None)).pages == 1024
    assert "activations not measured" in str(plan(CacheConfig(), facts(activations=None)))
