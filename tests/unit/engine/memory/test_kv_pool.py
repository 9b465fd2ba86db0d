import pytest
import torch

from tandem_engine.memory.pool import KvPool
from tandem_engine.names import DUMMY_PAGE, PageId


def make_pool(dtype: torch.dtype = torch.float32) -> KvPool:
    return KvPool(num_pages=5, num_layers=3, num_kv_heads=2, head_dim=8, page_size=4, dtype=dtype, device="cpu")


def test_the_layout_is_page_first_and_contiguous() -> None:
    pool = make_pool()
    assert pool.data.shape == (5, 3, 2, 2, 4, 8)
    assert pool.data.is_contiguous()


@pytest.mark.parametrize(("dtype", "itemsize"), [(torch.float32, 4), (torch.bfloat16, 2), (torch.float16, 2)])
def test_a_page_is_one_run_of_bytes(dtype: torch.dtype, itemsize: int) -> None:
    pool = make_pool(dtype)
    assert pool.page_bytes == 3 * 2 * 2 * 4 * 8 * itemsize
    assert pool.total_bytes == 5 * pool.page_bytes
    assert pool.page_view(PageId(2)).shape == (pool.page_bytes,)
    assert pool.page_view(PageId(2)).data_ptr() == pool.address + 2 * pool.page_bytes


def test_the_dummy_page_holds_finite_numbers() -> None:  # T38
    assert not make_pool().data[DUMMY_PAGE].any()


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


def test_padding_tokens_may_share_a_slot_of_the_dummy_page() -> None:  # T39
    pool = make_pool()
    pool.store(0, torch.ones(3, 2, 8), torch.ones(3, 2, 8), torch.zeros(3, dtype=torch.int64))
    assert pool.data[DUMMY_PAGE].isfinite().all()
    assert not pool.data[1:].any()


def test_store_converts_to_the_dtype_of_the_pool() -> None:
    pool = make_pool(torch.bfloat16)
    pool.store(0, torch.full((1, 2, 8), 1.5), torch.full((1, 2, 8), 2.5), torch.tensor([4]))
    assert pool.data[1, 0, 0, 0, 0, 0].item() == 1.5
    assert pool.data[1, 0, 1, 0, 0, 0].item() == 2.5
