"""Collectives over real gloo, between threads."""

import pytest
import torch

from tandem_engine.base.errors import ConfigError, RankLostError
from tandem_engine.parallel.group import Parallel, SingleRank
from tandem_engine.parallel.torch_group import join_ranks
from tandem_testing.rank_threads import on_ranks


def test_sum_has_the_same_bits_on_every_rank():
    def work(parallel: Parallel) -> torch.Tensor:
        mine = torch.randn(257, generator=torch.Generator().manual_seed(parallel.rank))
        return parallel.forward.all_reduce(mine)

    first, *others = on_ranks(3, work)
    expected = sum(torch.randn(257, generator=torch.Generator().manual_seed(rank)) for rank in range(3))
    torch.testing.assert_close(first, expected)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_every_dtype_of_a_model_can_be_summed(dtype):
    results = on_ranks(2, lambda parallel: parallel.forward.all_reduce(torch.ones(5, dtype=dtype)))
    assert all(torch.equal(result, torch.full((5,), 2, dtype=dtype)) for result in results)


def test_columns_are_gathered_in_order_of_rank():
    rows = torch.arange(3)[:, None] * 10
    gathered = on_ranks(2, lambda parallel: parallel.forward.all_gather(rows + 2 * parallel.rank + torch.arange(2)))
    assert all(torch.equal(result, rows + torch.arange(4)) for result in gathered)


def test_gathering_no_rows_needs_no_exchange():
    assert on_ranks(2, lambda p: p.forward.all_gather(torch.empty(0, 4)).shape) == [(0, 8), (0, 8)]


def test_least_and_broadcast_reach_all_ranks():
    def work(parallel: Parallel) -> tuple[list[int], list[int]]:
        least = parallel.schedule.least(torch.tensor([parallel.rank, 5 - parallel.rank]))
        return least.tolist(), parallel.schedule.broadcast(torch.tensor([parallel.rank + 7])).tolist()

    assert on_ranks(2, work) == [([0, 4], [7])] * 2


def test_rank_that_left_is_noticed_inside_a_collective():
    def work(parallel: Parallel) -> None:
        if parallel.rank == 0:
            parallel.forward.all_reduce(torch.ones(4))

    with pytest.raises(RankLostError, match="rank 0 of 2"):
        on_ranks(2, work)


def test_missing_rank_raises_rank_lost_after_timeout():
    store = torch.distributed.HashStore()
    with pytest.raises(RankLostError, match="rank 0 of 2 did not meet the others"):
        join_ranks(store, rank=0, size=2, device=torch.device("cpu"), timeout_s=0.2)


def test_device_without_a_backend_is_refused():
    with pytest.raises(ConfigError, match="--tensor-parallel-size"):
        join_ranks(torch.distributed.HashStore(), rank=0, size=2, device=torch.device("meta"), timeout_s=1.0)


def test_rank_that_is_alone_copies_nothing():
    group, tensor = SingleRank(), torch.ones(2, 3)
    assert (
        group.all_reduce(tensor) is group.all_gather(tensor) is group.broadcast(tensor) is group.least(tensor) is tensor
    )
