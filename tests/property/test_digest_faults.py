"""Whatever a transfer can do to a page as a whole, a sampled digest sees [verified-pages].

Pages hold what a model would leave there: every word of a token's slot follows from its layer, K or V, head, place in
the row and from all tokens up to it. So pages of sequences that begin alike are equal up to where they differ.
"""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from tandem_engine.base.names import PageId
from tandem_engine.disaggregation.digest import PageDigester
from tandem_engine.memory.pool import KvPool

HERE, THERE = PageId(1), PageId(2)
"""What was sent, and what is in the receiver's page."""

shapes = st.tuples(st.integers(1, 4), st.integers(1, 3), st.sampled_from([1, 4, 16, 20, 64, 80]), st.integers(1, 3))
"""Layers, heads, slots, words of a row."""
tokens = st.lists(st.integers(0, 5), min_size=80, max_size=80)


class Pages:
    """Two pages of one pool, under one key."""

    def __init__(self, shape: tuple[int, int, int, int], used: int) -> None:
        layers, heads, self.slots, row = shape
        self.used = min(used, self.slots)
        self.pool = KvPool(
            num_pages=3,
            num_layers=layers,
            num_kv_heads=heads,
            head_dim=row,
            page_size=self.slots,
            dtype=torch.int64,
            device="cpu",
        )
        self.digester = PageDigester(self.pool)

    def compute(self, page: PageId, sequence: list[int]) -> None:
        words = self.pool.data[page]
        layers, sides, heads, _, row = words.shape
        for slot in range(self.used):
            seed = xxh3_64_intdigest(bytes(sequence[: slot + 1]))
            generator = torch.Generator().manual_seed(seed >> 1)
            words[:, :, :, slot] = torch.randint(1, 2**62, (layers, sides, heads, row), generator=generator)

    def verifies(self, generation: int, first: int = 0, sent_as: int = 0) -> bool:
        tail = 0 if self.used == self.slots else self.used
        sent = self.digester.begin([HERE], room="r", generation=generation, first=sent_as or first, tail=tail).take()
        return sent == self.digester.begin([THERE], room="r", generation=generation, first=first, tail=tail).take()


faults = settings(max_examples=150, deadline=None)
generations = st.integers(1, 2**53)
used_slots = st.integers(1, 80)


@faults
@given(shapes, used_slots, tokens, generations)
def test_arrived_pages_verify(shape, used, sequence, generation):
    pages = Pages(shape, used)
    pages.compute(HERE, sequence)
    pages.pool.page_view(THERE).copy_(pages.pool.page_view(HERE))
    assert pages.verifies(generation)


@faults
@given(shapes, used_slots, tokens, generations)
def test_missed_page_is_seen(shape, used, sequence, generation):
    pages = Pages(shape, used)
    pages.compute(HERE, sequence)
    assert not pages.verifies(generation)


@faults
@given(shapes, used_slots, tokens, generations, st.data())
def test_stale_page_is_seen_however_late_its_sequence_differs(shape, used, sequence, generation, data):
    pages = Pages(shape, used)
    differs = data.draw(st.integers(0, pages.used - 1))
    pages.compute(HERE, sequence)
    pages.compute(THERE, [*sequence[:differs], sequence[differs] + 6, *sequence[differs + 1 :]])
    assert not pages.verifies(generation)


@faults
@given(shapes, used_slots, tokens, tokens, generations, st.data())
def test_page_with_missing_layer_is_detected(shape, used, sequence, other, generation, data):
    """The missing run begins and ends anywhere, as long as a layer lies within it: any run of two layers does."""
    pages = Pages(shape, used)
    pages.compute(HERE, sequence)
    pages.compute(THERE, [token + 6 for token in other])
    layer_bytes = pages.pool.page_bytes // shape[0]
    missed = data.draw(st.integers(0, shape[0] - 1))
    begin = data.draw(st.integers(0, missed * layer_bytes))
    end = data.draw(st.integers((missed + 1) * layer_bytes, pages.pool.page_bytes))
    here, there = pages.pool.page_view(HERE), pages.pool.page_view(THERE)
    there[:begin] = here[:begin]
    there[end:] = here[end:]
    assert not pages.verifies(generation)


@faults
@given(shapes, used_slots, tokens, generations, st.data())
def test_any_set_of_missing_layers_is_seen(shape, used, sequence, generation, data):
    pages = Pages(shape, used)
    pages.compute(HERE, sequence)
    written = data.draw(st.sets(st.integers(0, shape[0] - 1), max_size=shape[0] - 1))
    for layer in written:
        pages.pool.data[THERE, layer] = pages.pool.data[HERE, layer]
    assert not pages.verifies(generation)


@faults
@given(shapes, used_slots, tokens, generations, st.integers(1, 100), st.integers(101, 200))
def test_foreign_page_is_seen_though_its_bytes_are_the_same(shape, used, sequence, generation, first, sent_as):
    pages = Pages(shape, used)
    pages.compute(HERE, sequence)
    pages.pool.page_view(THERE).copy_(pages.pool.page_view(HERE))
    assert not pages.verifies(generation, first=first, sent_as=sent_as)
