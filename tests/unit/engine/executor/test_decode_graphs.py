"""Graphs of decodes: which one runs, what it reads, and what padding does."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from tandem_engine.base.errors import ConfigError
from tandem_engine.base.names import DUMMY_PAGE
from tandem_engine.config import GraphConfig, ModelImpl, MoeConfig
from tandem_engine.executor.cuda.graphs import (
    can_capture,
    graph_sizes,
    no_garbage_collection,
)
from tandem_engine.executor.cuda.step_graphs import capture_steps, measure_steps
from tandem_engine.executor.cuda.streams import StreamName
from tandem_engine.forward.step_inputs import as_decodes
from tandem_testing.forward_builders import HEAD_DIM, NUM_HEADS, Seq, make_batch
from tandem_testing.graph_tape import Tape
from tandem_testing.simulated_device import HostWaitError, reachable
from tandem_testing.stream_builders import Beside
from tandem_testing.toy_model import ToyModel

PAGES = {row: [10 * row + place for place in (1, 2)] for row in range(1, 6)}


def decodes(count: int, *, seq_len: int = 17, token: int = 5):
    return make_batch(
        [
            Seq(seq_len=seq_len + row, decode=True, pages=PAGES[row], row=row, input_ids=[token + row])
            for row in range(1, count + 1)
        ]
    )


@pytest.mark.parametrize(
    ("config", "most", "sizes"),
    [
        (GraphConfig(), 1, (1,)),
        (GraphConfig(), 6, (1, 2, 4, 6)),
        (GraphConfig(), 64, (1, 2, 4, *range(8, 65, 8))),
        (GraphConfig(max_rows=20), 64, (1, 2, 4, 8, 16, 20)),
        (GraphConfig(sizes=(3, 1, 9)), 64, (1, 3, 9)),
        (GraphConfig(sizes=(3, 1, 9), max_rows=4), 64, (1, 3)),
        (GraphConfig(enabled=False), 64, ()),
    ],
)
def test_decode_graph_sizes_follow_the_limits(config, most, sizes):
    assert graph_sizes(config, most=most) == sizes


def test_decode_graphs_default_to_256_rows_at_most():
    assert graph_sizes(GraphConfig(), most=4096)[-1] == 256
    assert graph_sizes(GraphConfig(max_rows=512), most=4096)[-3:] == (448, 480, 512)


@pytest.mark.parametrize(
    "settings", [{"max_rows": -1}, {"sizes": (0, 4)}, {"sizes": (8, 16), "max_rows": 4}], ids=["max", "sizes", "both"]
)
def test_impossible_sizes_are_refused(settings):
    with pytest.raises(ConfigError, match="--cuda-graph"):
        GraphConfig(**settings)


def test_smallest_with_room_runs_and_larger_steps_run_without():
    both = Beside(graph_sizes=(1, 2, 4))
    largest, middle, smallest = both.platform.capturer.tapes
    for count in (1, 2, 3, 4, 5):
        with torch.inference_mode():
            assert (
                both.streams.forward(decodes(count)).next_token_ids == both.host.forward(decodes(count)).next_token_ids
            )
    assert (smallest.replays, middle.replays, largest.replays) == (1, 1, 2)


def test_largest_is_captured_first():
    tapes = Beside(graph_sizes=(1, 2, 4)).platform.capturer.tapes
    rows = [tape.operations[0][1][0].shape[0] for tape in tapes]
    assert rows == [4, 2, 1]


@torch.inference_mode()
def test_decode_graph_replays_with_smaller_batches_have_correct_tokens():
    both = Beside(graph_sizes=(4,))
    for batch in (decodes(4, seq_len=28), decodes(1), decodes(2, seq_len=3), decodes(4)):
        assert both.streams.forward(batch).next_token_ids == both.host.forward(batch).next_token_ids
    assert both.platform.replays == 4


@torch.inference_mode()
def test_padding_writes_to_the_dummy_page_alone():  # [finite-padding] [dummy-page]
    both = Beside(graph_sizes=(4,))
    before = both.streams.pool.data.clone()
    both.streams.forward(decodes(1))
    changed = (both.streams.pool.data != before).flatten(1).any(dim=1).nonzero().squeeze(1).tolist()
    assert set(changed) <= {DUMMY_PAGE, PAGES[1][1]}
    assert PAGES[1][1] in changed
    assert bool(both.streams.pool.data[DUMMY_PAGE].isfinite().all())


def test_padding_comes_before_metadata():  # [pad-then-metadata]
    padded = as_decodes(decodes(2), 4)
    assert padded.seq_lens.tolist() == [18, 19, 1, 1]
    assert padded.page_table[2:].unique().tolist() == [DUMMY_PAGE]
    assert padded.out_cache_loc[2:].tolist() == [0, 0]
    assert padded.num_sequences == padded.num_tokens == 4


def test_graph_reads_only_buffers_with_its_lifetime():
    both = Beside(graph_sizes=(1, 2))
    lasting = {tensor.untyped_storage()._cdata for tensor in reachable(both.streams, but=Tape)}
    for tape in both.platform.capturer.tapes:
        assert tape.inputs() <= lasting


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_collected_before_a_capture_and_not_within(enabled):
    (gc.enable if enabled else gc.disable)()
    cycle: list[object] = [Tape(None)]
    cycle.append(cycle)
    gone = weakref.ref(cycle[0])
    del cycle
    try:
        with no_garbage_collection():
            assert gone() is None
            assert not gc.isenabled()
        assert gc.isenabled() is enabled
    finally:
        gc.enable()


def test_all_captures_of_a_kind_are_within_one_collection(monkeypatch):
    both, collected, within = Beside(graph_sizes=(1, 2)), [], []
    capture = both.platform.capturer.capture

    def watched(run):
        within.append(gc.isenabled())
        return capture(run)

    monkeypatch.setattr(both.platform.capturer, "capture", watched)
    monkeypatch.setattr(gc, "collect", lambda *_: collected.append(len(within)))
    decoding = both.platform.decoding_of(both.streams)
    with both.platform.streams.on(StreamName.FORWARD):
        sizes = {"decodes": (1, 2), "prompts": (4,)}
        measure_steps(both.platform.capturer, decoding, **sizes, meter=RisingMemory(0, 1, 2, 2, 3))
        capture_steps(both.platform.capturer, decoding, **sizes, meter=RisingMemory(0, 1, 1, 2))
    assert (within, collected) == ([False] * 6, [0, 2, 3, 5])
    assert gc.isenabled()


@torch.inference_mode()
def test_decode_graphs_are_recaptured_for_new_weights():
    both = Beside(graph_sizes=(2,))
    model = ToyModel.random()
    model.head = torch.randn(NUM_HEADS * HEAD_DIM, 97, generator=torch.Generator().manual_seed(9))
    both.platform.streams.adopt(model)
    both.streams.model = both.host.model = model
    assert both.streams.forward(decodes(2)).next_token_ids == both.host.forward(decodes(2)).next_token_ids
    assert [tape.replays for tape in both.platform.capturer.tapes] == [0, 1]


@pytest.mark.parametrize("graph_sizes", [(), (2,)])
def test_other_weights_are_there_before_a_step_reads_them(graph_sizes, monkeypatch):
    both = Beside(graph_sizes=graph_sizes)
    before, waited = both.streams.model, []
    monkeypatch.setattr(both.platform.streams, "synchronize", lambda: waited.append(both.streams.model))
    model = ToyModel.random()
    both.platform.streams.adopt(model)
    both.streams.model = model
    assert waited[0] is before


class LookingModel(ToyModel):
    def logits(self, hidden):
        return super().logits(hidden) * (1.0 if bool(hidden.isfinite().all()) else 0.0)


def test_model_that_syncs_with_device_cannot_be_captured():
    toy = ToyModel.random()
    with pytest.raises(HostWaitError):
        Beside(model=LookingModel(embedding=toy.embedding, position=toy.position, head=toy.head), graph_sizes=(1,))


def test_models_that_may_look_at_the_device_are_not_captured():
    plain = ToyModel.random().config
    moe = MoeConfig(num_experts=4, experts_per_token=2, intermediate_size=8, normalize=True)
    here, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert can_capture(plain, here)
    assert not can_capture(replace(plain, moe=moe), here)
    assert can_capture(replace(plain, moe=moe), gpu), "its experts are a kernel"
    assert not can_capture(replace(plain, impl=ModelImpl.TRANSFORMERS), gpu)


class RisingMemory:
    """Bytes of the process as they are asked for."""

    def __init__(self, *used: int) -> None:
        self._used = iter(used)

    def used(self) -> int:
        return next(self._used)


def test_graph_memory_is_extrapolated_from_two_largest():
    both = Beside(graph_sizes=(4,))
    decoding = both.platform.decoding_of(both.streams)
    meter = RisingMemory(1000, 1600, 1620, 1620, 1700, 1705)
    with both.platform.streams.on(StreamName.FORWARD):
        taken = measure_steps(both.platform.capturer, decoding, decodes=(1, 2, 4, 8), prompts=(4, 16, 32), meter=meter)
    assert taken == 600 + 3 * 20 + 80 + 2 * 5
