import numpy as np
import pytest
import torch

from tandem_engine.memory.cache_groups import ALL_TOKENS, CacheLayout, KvRow, KvSpec, Place, Reach
from tandem_engine.memory.pool import KvPool

ROW = KvRow(heads=2, width=8)


def specs(*windows: int | None) -> list[KvSpec]:
    return [KvSpec(reach=Reach(window), row=ROW) for window in windows]


def test_layers_with_equal_specs_form_one_group() -> None:
    layout = CacheLayout.of(specs(4, 4, None, 4, 9, None))
    assert [group.spec.reach for group in layout.groups] == [ALL_TOKENS, Reach(4), Reach(9)]
    assert [group.layers for group in layout.groups] == [(2, 5), (0, 1, 3), (4,)]
    assert layout.places == (Place(1, 0), Place(1, 1), Place(0, 0), Place(1, 2), Place(2, 0), Place(0, 1))


def test_merged_layers_keep_all_tokens_in_one_group() -> None:
    layout = CacheLayout.merged(specs(4, None, 9))
    assert [group.layers for group in layout.groups] == [(0, 1, 2)]
    assert layout.groups[0].spec.reach == ALL_TOKENS
    assert layout.places == (Place(0, 0), Place(0, 1), Place(0, 2))


@pytest.mark.parametrize("windows", [(None, None, None), (4, 4, 4), (4, None, 4)])
def test_page_of_the_merged_group_is_that_of_one_shape(windows: tuple[int | None, ...]) -> None:
    [group] = CacheLayout.merged(specs(*windows)).groups
    pool = KvPool.of_group(group, num_pages=3, page_size=4, dtype=torch.float32, device="cpu")
    assert pool.data.shape == (3, 3, 2, 2, 4, 8)
    assert pool.page_bytes == group.page_bytes(4, itemsize=4) == 3 * 2 * 2 * 4 * 8 * 4


def test_group_takes_the_scales_of_its_layers() -> None:
    scales = torch.arange(1.0, 13.0).view(3, 2, 2)
    group = CacheLayout.of(specs(4, None, 4)).groups[1]
    pool = KvPool.of_group(group, num_pages=2, page_size=4, dtype=torch.float8_e4m3fn, device="cpu", scales=scales)
    assert pool.scales is not None
    assert torch.equal(pool.scales, scales[[0, 2]])


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 9, 16])
@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_blocks_outside_a_window_are_read_by_no_token(window: int, page_size: int) -> None:
    reach, most = Reach(window), 0
    for tokens in range(40):
        read = {position // page_size for position in range(max(0, tokens - window + 1), tokens + 1)}
        assert reach.first_read(tokens) == max(0, tokens - window + 1)
        assert reach.passed_blocks(tokens, page_size) == min(read)
        # The next token is launched while the newest one is not committed.
        most = max(most, (tokens + 1) // page_size - min(read) + 1)
    assert most <= (reach.max_blocks(page_size) or 0) <= most + 1


@pytest.mark.parametrize("chunk", [2, 3, 4, 5, 9, 16])
@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_blocks_of_earlier_chunks_are_those_no_token_reads(chunk: int, page_size: int) -> None:
    reach, most = Reach(chunk=chunk), 0
    for tokens in range(60):
        first = tokens // chunk * chunk
        assert reach.first_read(tokens) == first
        assert reach.passed_blocks(tokens, page_size) == first // page_size
        most = max(most, (tokens + 1) // page_size - first // page_size + 1)
    assert most <= (reach.max_blocks(page_size) or 0) <= most + 1
    assert reach.first_reads(np.arange(60)).tolist() == [reach.first_read(tokens) for tokens in range(60)]


def test_layers_that_read_all_tokens_pass_no_block() -> None:
    assert ALL_TOKENS.passed_blocks(1000, 4) == 0
    assert ALL_TOKENS.max_blocks(4) is None
