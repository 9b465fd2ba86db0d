"""Weights of an adapter in one range of memory: the same values, dense, in the order in which a step reads them."""

from itertools import pairwise

import pytest
import torch

from tandem_engine.base import linux
from tandem_engine.base.linux import HUGE
from tandem_engine.model.adapters import arena
from tandem_engine.model.adapters.arena import ALIGNED, Sites, together
from tandem_engine.model.adapters.tensor_names import Site
from tandem_testing.adapters import random_adapter
from tandem_testing.random_weights import small_config


def tensors_of(sites: Sites) -> list[torch.Tensor]:
    return [tensor for site in sites.values() for tensor in (site.a, *(part.b.t() for part in site.parts))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [1, 3, 64])
def test_moved_weights_have_the_same_values(dtype: torch.dtype, rank: int) -> None:
    sites = random_adapter(small_config(), seed=1, rank=rank, dtype=dtype).sites
    moved = together(sites)
    assert moved.keys() == sites.keys()
    for place, site in sites.items():
        assert torch.equal(moved[place].a, site.a)
        for before, after in zip(site.parts, moved[place].parts, strict=True):
            assert (after.rows, after.outputs, after.scale) == (before.rows, before.outputs, before.scale)
            assert after.b.dtype is dtype
            assert torch.equal(after.b, before.b)


def test_weights_follow_each_other_from_the_first_huge_page_on() -> None:
    tensors = tensors_of(together(random_adapter(small_config(), seed=1, rank=5, dtype=torch.bfloat16).sites))
    assert all(tensor.is_contiguous() for tensor in tensors)
    assert tensors[0].data_ptr() % HUGE == 0
    for before, after in pairwise(tensors):
        assert after.data_ptr() == before.data_ptr() + -(-before.nbytes // ALIGNED) * ALIGNED


def test_layers_and_products_come_in_the_order_of_a_step() -> None:
    sites = random_adapter(small_config(), seed=1, rank=2).sites
    moved = together(dict(reversed([*sites.items()])))
    assert [*moved] == [(layer, site) for layer in range(small_config().num_layers) for site in Site]


def test_adapter_without_tensors_takes_no_memory() -> None:
    assert together({}) == {}


def test_weights_are_moved_where_a_kernel_has_no_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(linux, "advise", lambda *range_: bool(asked.append(range_)))
    monkeypatch.setattr(arena, "FILLED", 1)
    sites = random_adapter(small_config(), seed=1, rank=3).sites
    moved = together(sites)
    assert all(torch.equal(moved[place].a, site.a) for place, site in sites.items())
    assert asked
