"""Groups of layers with pools of their own give what one pool for all layers gives."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tandem_engine.forward.batch import ForwardBatch, GroupPages
from tandem_engine.forward.prompt_shape import PromptShape, as_prompt
from tandem_engine.forward.step_inputs import as_decodes
from tandem_engine.memory.cache_groups import Place
from tandem_engine.memory.pool import KvPool
from tandem_engine.model.attention.backend import AttentionSpec
from tandem_engine.model.attention.grouped import GroupedAttention, GroupedGraphAttention
from tandem_engine.model.attention.reference import TorchReferenceBackend
from tandem_testing.forward_builders import HEAD_DIM, NUM_KV_HEADS, Seq, make_batch, make_qkv
from tandem_testing.turning_reference import TurningReference

PAGE, WINDOW = 4, 6
SPECS = (AttentionSpec(scale=0.25, window=WINDOW), AttentionSpec(scale=0.25), AttentionSpec(scale=0.25, window=WINDOW))
PLACES = (Place(1, 0), Place(0, 0), Place(1, 1))


def pool(layers: int, pages: int = 12) -> KvPool:
    return KvPool(
        num_pages=pages,
        num_layers=layers,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        page_size=PAGE,
        dtype=torch.float32,
        device="cpu",
    )


def mapped(batch: ForwardBatch, page_of: dict[int, int]) -> ForwardBatch:
    """With pages of the window: `page_of` those of the first group, 0 for any other."""
    table = torch.tensor([[page_of.get(page, 0) for page in row] for row in batch.page_table.tolist()])
    pages = torch.tensor([page_of[slot // PAGE] for slot in batch.out_cache_loc.tolist()])
    slots = pages * PAGE + batch.out_cache_loc % PAGE
    return replace(batch, windows=(GroupPages(table.int(), slots),))


def steps() -> list[tuple[ForwardBatch, dict[int, int]]]:
    """A prompt of 11 tokens, then decodes; block 0 leaves the window and its page takes block 4."""
    pages = [5, 9, 2, 7, 3]
    at_first = {5: 1, 9: 2, 2: 3}
    later = {9: 2, 2: 3, 7: 4, 3: 1}
    lengths = [(11, 11), *((length, 1) for length in range(12, 20))]
    return [
        (
            make_batch([Seq(seq_len=length, extend_len=new, decode=new == 1, pages=pages)], page_size=PAGE),
            at_first if length <= 12 else later,
        )
        for length, new in lengths
    ]


def test_each_layer_reads_the_pages_of_its_group() -> None:
    whole = TorchReferenceBackend(pool(3), specs=SPECS)
    backends = [
        TorchReferenceBackend(pool(1), specs=SPECS[1:2]),
        TorchReferenceBackend(pool(2, pages=5), specs=SPECS[::2]),
    ]
    grouped = GroupedAttention(backends, windows=1, places=PLACES)
    for batch, page_of in steps():
        expected, plan = whole.plan(batch), grouped.plan(mapped(batch, page_of))
        for layer in range(3):
            qkv = make_qkv(batch.num_tokens)
            assert torch.equal(plan(layer, *qkv), expected(layer, *qkv))


def test_graph_loads_the_tables_of_every_group() -> None:
    """A step of two rows, then one of one: nothing of the first may remain."""
    backends = [TurningReference(pool(1), specs=SPECS[1:2]), TurningReference(pool(2, pages=5), specs=SPECS[::2])]
    plan = GroupedGraphAttention(backends, windows=1, places=PLACES).graph_plan(2, 5)
    two = make_batch(
        [Seq(seq_len=9, decode=True, pages=[5, 9, 2]), Seq(seq_len=2, decode=True, pages=[7])], page_size=PAGE
    )
    one = make_batch([Seq(seq_len=3, decode=True, pages=[3])], page_size=PAGE)
    for batch, page_of in ((two, {5: 1, 9: 2, 2: 3, 7: 4}), (one, {3: 2})):
        plan.load(as_decodes(mapped(batch, page_of), 2))
    assert plan.slots.tolist() == [3 * PAGE + 2, 0]
    tables = [graph.page_table.tolist() for graph in plan.graphs]
    assert tables == [[[3, 0, 0, 0, 0], [0] * 5], [[2, 0, 0, 0, 0], [0] * 5]]
    assert [graph.slots.tolist() for graph in plan.graphs] == [[3 * PAGE + 2, 0], [2 * PAGE + 2, 0]]
    assert [graph.seq_lens.tolist() for graph in plan.graphs] == [[3, 1], [3, 1]]


def test_graph_of_prompts_loads_the_tables_of_every_group() -> None:
    backends = [TurningReference(pool(1), specs=SPECS[1:2]), TurningReference(pool(2, pages=5), specs=SPECS[::2])]
    shape = PromptShape(tokens=8, rows=3, extends=2)
    plan = GroupedGraphAttention(backends, windows=1, places=PLACES).prompt_graph_plan(shape, 4)
    two = make_batch(
        [Seq(seq_len=9, extend_len=5, pages=[5, 9, 2]), Seq(seq_len=2, decode=True, pages=[7])], page_size=PAGE
    )
    one = make_batch([Seq(seq_len=3, extend_len=3, pages=[3])], page_size=PAGE)
    for batch, page_of in ((two, {5: 1, 9: 2, 2: 3, 7: 4}), (one, {3: 2})):
        plan.load(as_prompt(mapped(batch, page_of), shape))
        assert [graph.page_table[-1].tolist() for graph in plan.graphs] == [[0] * 4] * 2
    assert [graph.page_table[0].tolist() for graph in plan.graphs] == [[3, 9, 2, 0], [2, 2, 3, 0]]
    assert [graph.slots.tolist() for graph in plan.graphs] == [
        [*range(first, first + 3), *[0] * 5] for first in (3 * PAGE, 2 * PAGE)
    ]
    assert plan.extend_lens.tolist() == plan.seq_lens.tolist() == [3, 0, 5]


@pytest.mark.parametrize("windows", [(), (1,)])
def test_single_group_plans_the_step_itself(windows: Sequence[int]) -> None:
    """So that a step of few tokens may be one compiled call."""
    backend = TorchReferenceBackend(pool(1), specs=SPECS[:1])
    batch, page_of = steps()[0]
    grouped = GroupedAttention([backend], windows=1, places=(Place(0, 0),))
    assert type(grouped.plan(mapped(batch, page_of) if windows else batch)) is type(backend.plan(batch))
