"""Digests prove bytes and place."""

import pytest
import torch

from tandem_engine.base.names import DigestKind, PageId
from tandem_engine.disaggregation.digest import PageDigester
from tandem_engine.memory.pool import KvPool


def make_pool(dtype: torch.dtype = torch.float32) -> KvPool:
    pool = KvPool(num_pages=5, num_layers=2, num_kv_heads=1, head_dim=4, page_size=4, dtype=dtype, device="cpu")
    pool.data.copy_(torch.arange(pool.data.numel()).view_as(pool.data))
    return pool


def digests(
    pool: KvPool,
    *pages: int,
    room: str = "room",
    generation: int = 1,
    first: int = 0,
    kind: DigestKind = DigestKind.SAMPLED,
) -> tuple[int, ...]:
    wanted = tuple(PageId(page) for page in pages)
    return PageDigester(pool).begin(wanted, room=room, generation=generation, first=first, kind=kind).take()


kinds = pytest.mark.parametrize("kind", list(DigestKind))


@kinds
def test_equal_pages_in_different_pools_have_equal_digests(kind):
    here, there = make_pool(), make_pool()
    there.page_view(PageId(4)).copy_(here.page_view(PageId(1)))
    assert digests(here, 1, kind=kind) == digests(there, 4, kind=kind)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_one_changed_bit_anywhere_changes_a_full_digest(dtype):
    pool = make_pool(dtype)
    before = digests(pool, 2, kind=DigestKind.FULL)
    for byte in (0, pool.page_bytes // 2, pool.page_bytes - 1):
        pool.page_view(PageId(2))[byte] ^= 1
        assert digests(pool, 2, kind=DigestKind.FULL) != before
        pool.page_view(PageId(2))[byte] ^= 1
    assert digests(pool, 2, kind=DigestKind.FULL) == before


@kinds
@pytest.mark.parametrize("other", [{"room": "other"}, {"generation": 2}, {"first": 1}])
def test_same_bytes_in_another_place_have_another_digest(other, kind):
    pool = make_pool()
    assert digests(pool, 1, kind=kind) != digests(pool, 1, kind=kind, **other)


@kinds
def test_run_has_the_digests_of_its_parts(kind):
    pool = make_pool()
    parts = (*digests(pool, 1, kind=kind), *digests(pool, 2, 3, first=1, kind=kind))
    assert digests(pool, 1, 2, 3, kind=kind) == parts


@kinds
def test_digests_are_unsigned_64_bit(kind):
    assert all(0 <= digest < 2**64 for digest in digests(make_pool(), 1, 2, 3, 4, kind=kind))
