import pytest
import torch

from tandem_engine.base import linux
from tandem_engine.base.names import DUMMY_PAGE, PageId
from tandem_engine.memory.pool import HUGE_PAGES_FROM, KvPool, untouched_zeros


def make_pool(dtype: torch.dtype = torch.float32) -> KvPool:
    return KvPool(num_pages=5, num_layers=3, num_kv_heads=2, head_dim=8, page_size=4, dtype=dtype, device="cpu")


def test_layout_is_page_first_and_contiguous() -> None:
    pool = make_pool()
    assert pool.data.shape == (5, 3, 2, 2, 4, 8)
    assert pool.data.is_contiguous()


@pytest.mark.parametrize(("dtype", "itemsize"), [(torch.float32, 4), (torch.bfloat16, 2), (torch.float16, 2)])
def test_page_is_one_run_of_bytes(dtype: torch.dtype, itemsize: int) -> None:
    pool = make_pool(dtype)
    assert pool.page_bytes == 3 * 2 * 2 * 4 * 8 * itemsize
    assert pool.total_bytes == 5 * pool.page_bytes
    assert pool.page_view(PageId(2)).shape == (pool.page_bytes,)
    assert pool.page_view(PageId(2)).data_ptr() == pool.address + 2 * pool.page_bytes


def test_dummy_page_holds_finite_numbers() -> None:  # [finite-padding]
    assert not make_pool().data[DUMMY_PAGE].any()


def test_large_pool_is_made_where_no_huge_pages_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a real-time kernel."""
    asked = []
    monkeypatch.setattr(linux, "advise", lambda *range_: bool(asked.append(range_)))
    zeros = untouched_zeros(HUGE_PAGES_FROM + 1)
    assert zeros.shape == (HUGE_PAGES_FROM + 1,)
    assert not zeros.any()
    assert [size for _, size, _ in asked] == [HUGE_PAGES_FROM + 1]


def test_page_view_is_no_copy() -> None:
    pool = make_pool()
    pool.page_view(PageId(3)).fill_(1)
    assert (pool.page_view(PageId(3)) == 1).all()
    assert pool.data[3].all()
    assert not pool.data[2].any()
    assert not pool.data[4].any()


def test_each_token_lands_in_its_slot_and_nowhere_else() -> None:
    pool = make_pool()
    slots = torch.tensor([4 * 2 + 3, 4 * 4 + 0, 4 * 2 + 1])
    k, v = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    pool.store(1, k, v, slots)
    keys, values = pool.key_value(1)
    for token, slot in enumerate(slots.tolist()):
        page, offset = divmod(slot, pool.page_size)
        assert torch.equal(keys[page, :, offset], k[token])
        assert torch.equal(values[page, :, offset], v[token])
    assert int(pool.data.count_nonzero()) == k.numel() + v.numel()


def test_key_value_are_views_of_one_layer() -> None:
    pool = make_pool()
    keys, values = pool.key_value(2)
    keys.fill_(1)
    values.fill_(2)
    assert keys.shape == values.shape == (5, 2, 4, 8)
    assert (pool.data[:, 2, 0] == 1).all()
    assert (pool.data[:, 2, 1] == 2).all()
    assert not pool.data[:, :2].any()


def test_padding_tokens_may_share_a_slot_of_the_dummy_page() -> None:  # [dummy-page]
    pool = make_pool()
    pool.store(0, torch.ones(3, 2, 8), torch.ones(3, 2, 8), torch.zeros(3, dtype=torch.int64))
    assert pool.data[DUMMY_PAGE].isfinite().all()
    assert not pool.data[1:].any()


def test_store_converts_to_the_dtype_of_the_pool() -> None:
    pool = make_pool(torch.bfloat16)
    pool.store(0, torch.full((1, 2, 8), 1.5), torch.full((1, 2, 8), 2.5), torch.tensor([4]))
    assert pool.data[1, 0, 0, 0, 0, 0].item() == 1.5
    assert pool.data[1, 0, 1, 0, 0, 0].item() == 2.5


FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", FLOAT8)
def test_page_of_float8_has_a_byte_for_each_number(dtype: torch.dtype) -> None:
    assert make_pool(dtype).page_bytes == 3 * 2 * 2 * 4 * 8
    assert make_pool().scales is None


@pytest.mark.parametrize("dtype", FLOAT8)
def test_float8_is_scaled_on_its_way_in_and_out(dtype: torch.dtype) -> None:
    pool, slots = make_pool(dtype), torch.tensor([9, 17])
    scales = torch.ones(3, 2, 2)
    scales[1] = torch.tensor([[0.5, 4.0], [2.0, 0.25]])
    pool.set_scales(scales)
    k, v = (torch.tensor([1.0, 1.5, -3.0, 0.0])[torch.randint(4, (2, 2, 8))] for _ in range(2))
    pool.store(1, k, v, slots)
    stored_k, stored_v = pool.key_value(1)
    assert torch.equal(stored_k[2, :, 1].float(), k[0] / scales[1, 0][:, None])
    assert torch.equal(stored_v[4, :, 1].float(), v[1] / scales[1, 1][:, None])
    for found, given in zip(pool.gathered(1, slots // 4, slots % 4), (k, v), strict=True):
        assert torch.equal(found, given)


@pytest.mark.parametrize("dtype", FLOAT8)
def test_numbers_too_large_for_float8_become_its_largest(dtype: torch.dtype) -> None:
    """E4M3 has no infinity: without this they would be NaN, and with them all that is computed after."""
    pool, largest = make_pool(dtype), torch.finfo(dtype).max
    pool.store(0, torch.full((1, 2, 8), 1e6), torch.full((1, 2, 8), -torch.inf), torch.tensor([4]))
    assert {float(x) for x in pool.data[1, 0, 0, :, 0].float().flatten()} == {largest}
    assert {float(x) for x in pool.data[1, 0, 1, :, 0].float().flatten()} == {-largest}


def test_pages_of_float8_are_copied_with_the_others() -> None:
    pool = make_pool(torch.float8_e4m3fn)
    pool.store(0, torch.ones(1, 2, 8), torch.ones(1, 2, 8), torch.tensor([4]))
    pool.copy_pages([(PageId(1), PageId(3))])
    assert torch.equal(pool.page_view(PageId(1)), pool.page_view(PageId(3)))
    assert pool.page_view(PageId(3)).any()


def test_page_of_latents_holds_each_once() -> None:
    pool = KvPool(
        num_pages=5,
        num_layers=3,
        num_kv_heads=1,
        head_dim=8,
        page_size=4,
        dtype=torch.float32,
        device="cpu",
        value_width=6,
    )
    assert pool.page_bytes == 3 * 4 * 8 * 4
    assert pool.layout.rows == 3 * 4
    latents, slots = torch.randn(2, 1, 8), torch.tensor([9, 17])
    pool.store(1, latents, latents[..., :6], slots)
    keys, values = pool.gathered(1, slots // 4, slots % 4)
    assert torch.equal(keys, latents)
    assert torch.equal(values, latents[..., :6])
    assert int(pool.data.count_nonzero()) == latents.numel()
