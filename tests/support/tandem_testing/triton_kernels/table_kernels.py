"""Tables of rows and pages on a device hold what those of a CPU hold."""

import torch

from tandem_engine.forward.batch import RESOLVE
from tandem_engine.forward.future_map import FutureMap
from tandem_engine.kernels.triton import page_copy, row_tables
from tandem_engine.kernels.triton import page_copy as page_gather
from tandem_engine.speculative.eagle import HiddenStates
from tandem_testing.forward_builders import Seq, make_batch
from tandem_testing.triton_kernels.ahead_of_time import compile_kernel
from tandem_testing.triton_kernels.tensors import kernels_on, random_floats, to_device

INTS = "*i64:16"


def check_tokens_are_resolved_and_published_as_the_future_map_does(device: str) -> None:
    rows = torch.tensor([4, 2, 9, 0])
    tokens = torch.tensor([11, 12, 13, 14])
    there, here = torch.full((10,), -1, dtype=torch.int64, device=device), FutureMap(9)
    row_tables.publish_tokens(there, rows.to(device), tokens.to(device))
    here.publish(rows, tokens)
    input_ids = torch.tensor([7, RESOLVE, 8, RESOLVE, RESOLVE])
    wanted = torch.tensor([1, 9, 1, 2, 4])
    found = row_tables.resolve_tokens(there, input_ids.to(device), wanted.to(device))
    assert found.tolist() == here.resolve(input_ids, wanted).tolist() == [7, 13, 8, 12, 11]


def check_a_token_that_means_nothing_is_published_as_0(device: str) -> None:
    table = torch.full((4,), 5, dtype=torch.int64, device=device)
    row_tables.publish_tokens(
        table, torch.tensor([1, -1, 3], device=device), torch.tensor([-1, 9, 9], device=device)
    )  # fmt: skip
    assert table.tolist() == [5, 0, 5, 9]


def check_rows_of_any_dtype_move(device: str) -> None:
    rows = torch.tensor([3, -1, 1], device=device)
    for dtype, shape in ((torch.int64, ()), (torch.bfloat16, (3,)), (torch.float32, (2, 700)), (torch.bool, (5,))):
        table = (torch.arange(5 * max(1, torch.Size(shape).numel())) % 7).to(dtype).view(5, *shape).to(device)
        gathered = row_tables.gather_rows(table, rows)
        assert torch.equal(gathered[[0, 2]], table[[3, 1]]), dtype
        assert not gathered[1].any()
        target = torch.zeros_like(table)
        row_tables.scatter_rows(target, rows, gathered)
        assert torch.equal(target[[3, 1]], table[[3, 1]])
        assert not target[[0, 2, 4]].any()


def check_hidden_states_are_kept_as_on_a_cpu(device: str) -> None:
    """A sequence that begins here, one that continues behind a page boundary, and a decode; padding writes page 0."""
    begins = Seq(seq_len=3, extend_len=3, pages=[2], input_ids=[1, 2, 3])
    continues = Seq(seq_len=6, extend_len=2, pages=[4, 1], input_ids=[4, 5])
    batch = make_batch([begins, continues, Seq(seq_len=2, decode=True, pages=[3], input_ids=[6])], page_size=4)
    shape = {"num_pages": 5, "page_size": 4, "hidden_size": 6, "dtype": torch.bfloat16}
    known = random_floats(20, 6, seed=1, dtype=torch.bfloat16, device="cpu")
    made = random_floats(6, 6, seed=2, dtype=torch.bfloat16, device="cpu")
    with kernels_on(device):
        there = HiddenStates(**shape, device=device)
        there.observe(known.to(device), torch.arange(20, device=device))
        before = there.before(to_device(batch, device)).cpu()
        there.observe(made.to(device), batch.out_cache_loc.to(device))
        after = there.before(to_device(batch, device)).cpu()
    here = HiddenStates(**shape, device="cpu")
    here.observe(known, torch.arange(20))
    assert torch.equal(before, here.before(batch))
    here.observe(made, batch.out_cache_loc)
    assert torch.equal(after, here.before(batch))
    assert not before[0].any()
    assert torch.equal(before[3], known[4 * 4 + 3])
    assert torch.equal(after[1], made[0])


def check_pages_are_copied_whole(device: str) -> None:
    for page_bytes in (24, 40_008, 13):
        pool = torch.randint(0, 256, (6, page_bytes), generator=torch.Generator().manual_seed(1)).byte().to(device)
        before, pages = pool.clone(), torch.tensor([5, 2], device=device)
        page_copy.copy_pages(pool, pages, torch.tensor([1, 4], device=device))
        expected = before.clone()
        expected[[1, 4]] = before[[5, 2]]
        assert torch.equal(pool, expected)
        page_copy.copy_pages(pool, pages, torch.tensor([0, -1], device=device))
        expected[0] = before[5]
        assert torch.equal(pool, expected)


def check_pages_go_to_memory_of_the_host_and_back(device: str) -> None:
    """Of bytes and of words, and of more blocks than there are programs; what is between them stays as it is."""
    for page_bytes in (13, 24, 4096 * 40 + 8):
        pool = torch.randint(0, 256, (6, page_bytes), generator=torch.Generator().manual_seed(1)).byte().to(device)
        host = torch.zeros((4, page_bytes), dtype=torch.uint8, pin_memory=device != "cpu")
        there, here = torch.tensor([5, 1], device=device), torch.tensor([0, 3], device=device)
        page_gather.gather_pages(pool, host, there, here)
        wait_for(device)
        assert torch.equal(host[[0, 3]], pool[[5, 1]].cpu())
        assert not host[[1, 2]].any()
        back, before = torch.tensor([2, 4], device=device), pool.clone()
        page_gather.gather_pages(host, pool, here, back)
        assert torch.equal(pool[[2, 4]], before[[5, 1]])
        assert torch.equal(pool[[0, 1, 3, 5]], before[[0, 1, 3, 5]])


def wait_for(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def compile_tables_and_pages(arch: int) -> None:
    block = {"BLOCK": row_tables.BLOCK}
    ids = dict.fromkeys(("table", "input_ids", "rows", "out"), INTS) | {"count": "i32"}
    compile_kernel(row_tables.resolve_kernel, ids, block, arch=arch).assert_fits()
    ids = dict.fromkeys(("table", "rows", "token_ids"), INTS) | {"count": "i32"}
    compile_kernel(row_tables.publish_kernel, ids, block, arch=arch).assert_fits()
    moved = dict.fromkeys(("table", "values", "rows"), INTS) | {"width": "i32:16"}
    for scatter in (False, True):
        compile_kernel(row_tables.move_rows_kernel, moved, block | {"SCATTER": scatter}, arch=arch).assert_fits()
    pages = dict.fromkeys(("pool", "sources", "targets"), INTS)
    strides = dict.fromkeys(("page_stride", "page_words"), "i32:16")
    constants = {"BLOCK": page_copy.BLOCK}
    compile_kernel(
        page_copy.copy_pages_kernel, pages | strides, constants, arch=arch, num_warps=page_copy.WARPS
    ).assert_fits()
    pages = dict.fromkeys(("source", "target"), INTS) | {"sources": "*i64", "targets": "*i64", "count": "i32"}
    strides = dict.fromkeys(("source_stride", "target_stride", "page_words"), "i32:16")
    constants = {"BLOCK": page_gather.GATHER_BLOCK}
    compile_kernel(page_gather.gather_pages_kernel, pages | strides, constants, arch=arch).assert_fits()


def compile_indices_of_pages_may_lie_anywhere() -> None:
    """Two rows of one tensor, the second 16 bytes apart or 8: every other copy waited for a program of its own."""
    params = page_gather.gather_pages_kernel.params
    assert {"sources", "targets"} <= {each.name for each in params if each.do_not_specialize_on_alignment}
