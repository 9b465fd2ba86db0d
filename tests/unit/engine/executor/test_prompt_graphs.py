"""Graphs of steps with prompts: which one runs, what it reads, and what padding does."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from tandem_engine.base.clock import MonotonicClock
from tandem_engine.base.errors import ConfigError
from tandem_engine.base.names import DUMMY_PAGE, PADDING_ROW
from tandem_engine.config import GraphConfig
from tandem_engine.executor.cuda.prompt_graphs import (
    MAX_EXTENDS,
    PromptGraphs,
    can_capture_prompts,
    prompt_sizes,
    run_room,
    shape_of,
)
from tandem_engine.forward.batch import ForwardMode, PromptPositions, Snapshot
from tandem_engine.forward.kv_progress import KvProgress
from tandem_engine.forward.prompt_shape import PromptShape, as_prompt, can_be_prompt
from tandem_engine.forward.results import PooledTokens
from tandem_engine.memory.listed_runs import RunRoom
from tandem_engine.memory.state_pool import StatePool, StateSpec
from tandem_engine.model.attention.backend import AttentionSpec
from tandem_engine.model.attention.reference import TorchReferenceBackend
from tandem_testing.forward_builders import NUM_LAYERS, Seq, make_batch, make_pool
from tandem_testing.graph_tape import Tape
from tandem_testing.simulated_device import reachable
from tandem_testing.stream_builders import Beside
from tandem_testing.toy_model import ToyModel
from tandem_testing.triton_kernels.tensors import kernels_on
from tandem_testing.turning_reference import TurningReference

SIZES = (4, 16, 24)
SMALL = ToyModel.random().config


def prompt(tokens: int, *, row: int = 1, cached: int = 0, first_id: int = 3, **facts: object) -> Seq:
    """So many tokens behind `cached` ones, on pages of its row."""
    length = cached + tokens
    pages = [10 * row + place for place in range(-(-length // 16))]
    ids = [(first_id + 7 * place) % 97 for place in range(tokens)]
    return Seq(seq_len=length, extend_len=tokens, pages=pages, row=row, input_ids=ids, **facts)


def decode(row: int, *, seq_len: int = 18) -> Seq:
    return Seq(seq_len=seq_len, decode=True, pages=[10 * row, 10 * row + 1], row=row, input_ids=[row + 5])


def both_of(**facts: object) -> Beside:
    return Beside(prompt_sizes=SIZES, **facts)


def agree(both: Beside, batch) -> None:
    assert both.streams.forward(batch) == replace(both.host.forward(batch), compute_s=1e-3)


STEPS = {
    "one token less than a graph": [prompt(15)],
    "as many as a graph": [prompt(16)],
    "one token": [prompt(1, cached=5)],
    "behind cached tokens": [prompt(9, cached=30)],
    "several": [prompt(3), prompt(9, row=2, cached=16), prompt(2, row=3)],
    "beside decodes": [prompt(7), decode(2), decode(3, seq_len=1)],
    "a chunk that samples nothing": [prompt(6, samples=False), prompt(4, row=2)],
    "chunks alone": [prompt(6, samples=False)],
}


@torch.inference_mode()
@pytest.mark.parametrize("name", STEPS)
def test_step_by_graph_equals_step_on_host(name):
    both = both_of()
    agree(both, make_batch(STEPS[name]))
    assert both.platform.replays == 1


@torch.inference_mode()
def test_smallest_with_room_runs_and_larger_steps_run_without():
    both = both_of()
    largest, middle, smallest = both.platform.capturer.tapes
    for tokens in (3, 4, 5, 16, 17, 24, 25):
        agree(both, make_batch([prompt(tokens)]))
    assert (smallest.replays, middle.replays, largest.replays) == (2, 2, 2)


@torch.inference_mode()
def test_prompt_graph_replays_with_other_sizes_have_correct_tokens():
    both = both_of()
    for step in ("several", "as many as a graph", "one token", "beside decodes", "behind cached tokens", "several"):
        agree(both, make_batch(STEPS[step]))
    assert both.platform.replays == 6


@torch.inference_mode()
def test_padding_has_the_dummy_page_after_any_step():
    """It has more pages than the step before it had, and those of a step with other pages lay at their places."""
    both = both_of()
    agree(both, make_batch([prompt(2, cached=45)]))
    agree(both, make_batch([prompt(17)]))
    for graph in both.streams._graphs.prompts._graphs:
        assert graph.plan.page_table[-1].unique().tolist() == [DUMMY_PAGE]
        assert graph.plan.page_table.shape[1] * 16 >= graph.shape.tokens


@torch.inference_mode()
def test_padding_writes_to_the_dummy_page_alone():  # [finite-padding] [dummy-page]
    both = both_of()
    before = both.streams.pool.data.clone()
    both.streams.forward(make_batch([prompt(5, row=2)]))
    changed = (both.streams.pool.data != before).flatten(1).any(dim=1).nonzero().squeeze(1).tolist()
    assert 20 in changed
    assert set(changed) <= {DUMMY_PAGE, 20}
    assert bool(both.streams.pool.data[DUMMY_PAGE].isfinite().all())


@torch.inference_mode()
def test_contents_of_other_pages_change_no_bit():
    results = []
    for noise in (0.0, torch.nan):
        both = both_of()
        both.streams.pool.data[40:] = noise
        results.append(both.streams.logits(make_batch([prompt(5), decode(2)])))
    assert torch.equal(*results)


def test_padding_is_the_last_sequence():
    padded = as_prompt(make_batch([prompt(5), decode(2)]), PromptShape(tokens=16, rows=5, extends=3))
    assert padded.extend_lens.tolist() == [5, 1, 0, 0, 10]
    assert padded.seq_lens.tolist() == [5, 18, 0, 0, 10]
    assert padded.rows.tolist() == [1, 2, *[PADDING_ROW] * 3]
    assert padded.out_cache_loc[6:].tolist() == padded.positions[6:].tolist() == [0] * 10
    assert padded.num_tokens == 16


def test_graph_reads_only_buffers_with_its_lifetime():
    both = both_of()
    lasting = {tensor.untyped_storage()._cdata for tensor in reachable(both.streams, but=Tape)}
    for tape in both.platform.capturer.tapes:
        assert tape.inputs() <= lasting


@torch.inference_mode()
def test_logprobs_of_prompts_and_embeddings_use_graphs():
    both = both_of()
    tokens = torch.arange(6)
    scores = PromptPositions(sequence=0, first=1, tokens=tokens, token_ids=tokens + 1, top=2)
    batch = make_batch([prompt(7), prompt(3, row=2)])
    pooled = PooledTokens(sequence=1, first=0, tokens=torch.arange(7, 10))
    batch = replace(batch, prompt_positions=(scores,), pooled=(pooled,))
    ours, theirs = both.streams.forward(batch), both.host.forward(batch)
    assert both.platform.replays == 1
    for one, other in zip(ours.prompt_scores[0].logprobs, theirs.prompt_scores[0].logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
        assert one.rank == other.rank
    assert ours.pooled[0].total == pytest.approx(theirs.pooled[0].total, abs=1e-4)


@torch.inference_mode()
def test_decodes_use_their_own_graphs():
    both = both_of(graph_sizes=(2,))
    agree(both, make_batch([decode(1), decode(2)]))
    agree(both, make_batch([decode(1), decode(2), decode(3)]))
    decodes = both.platform.capturer.tapes[0]
    assert (decodes.replays, both.platform.replays) == (1, 1)


@torch.inference_mode()
def test_layers_are_reported_when_a_graph_ends():
    both, progress = both_of(), KvProgress(MonotonicClock())
    both.streams.forward(replace(make_batch([prompt(7)]), kv_progress=progress))
    assert both.platform.replays == 1
    assert [progress.layers for _ in range(both.platform.streams.looks + 1)] == [0, 0, NUM_LAYERS]


@torch.inference_mode()
def test_eager_steps_use_no_graph():
    both = both_of(graph_sizes=(2,))
    for batch in (make_batch([prompt(7)]), make_batch([decode(1)])):
        agree(both, replace(batch, eager=True))
    assert both.platform.replays == 0


def test_steps_of_draft_networks_and_decodes_are_no_prompts():
    batch = make_batch([prompt(7)])
    assert can_be_prompt(batch)
    assert not can_be_prompt(replace(batch, mode=ForwardMode.DRAFT_EXTEND))
    assert not can_be_prompt(make_batch([decode(1)]))


def test_step_of_too_many_sequences_does_not_fit():
    shape = PromptShape(tokens=16, rows=3, extends=2)
    assert shape.fits(make_batch([prompt(5), decode(2)]))
    assert not shape.fits(make_batch([prompt(5), decode(2), decode(3)]))
    assert not shape.fits(make_batch([prompt(5), prompt(2, row=2)]))
    assert shape.fits(make_batch([prompt(5), prompt(1, row=2)])), "one token is no work of tiles"
    assert not shape.fits(make_batch([prompt(17)]))


def test_long_step_in_transfer_uses_no_graph_for_layer_reports():
    both = both_of()
    graphs = both.streams._graphs.prompts
    sent = replace(make_batch([prompt(20)]), kv_progress=KvProgress(MonotonicClock()))
    assert graphs.fitting(sent) is not None
    fewer = PromptGraphs(graphs._graphs, most_reported=19)
    assert fewer.fitting(sent) is None
    assert fewer.fitting(replace(sent, kv_progress=None)) is not None


@pytest.mark.parametrize(
    ("config", "most", "sizes"),
    [
        (GraphConfig(), 10, (10,)),
        (GraphConfig(), 100, (16, 32, 64, 100)),
        (GraphConfig(max_prompt_tokens=300), 4096, (16, 32, 64, 128, 192, 256, 300)),
        (GraphConfig(prompt_sizes=(30, 8, 90)), 64, (8, 30, 90)),
        (GraphConfig(prompt_sizes=(30, 8, 90), max_prompt_tokens=40), 64, (8, 30)),
        (GraphConfig(prompts=False), 64, ()),
        (GraphConfig(enabled=False), 64, ()),
    ],
)
def test_prompt_graph_sizes_follow_the_limits(config, most, sizes):
    assert prompt_sizes(config, SMALL, most=most) == sizes


def test_padding_of_large_steps_is_at_most_a_fifth():
    sizes = prompt_sizes(GraphConfig(max_prompt_tokens=8192), SMALL, most=10000)
    assert sizes[-1] == 8192
    assert all(after <= 1.25 * before for before, after in pairwise(sizes) if before >= 256)


@pytest.mark.parametrize(
    ("hidden_size", "largest"), [(1024, 4096), (2048, 2048), (2560, 1024), (8192, 1024), (64, 4096)]
)
def test_narrow_models_have_graphs_of_more_tokens(hidden_size, largest):
    assert prompt_sizes(GraphConfig(), replace(SMALL, hidden_size=hidden_size), most=10000)[-1] == largest


@pytest.mark.parametrize(
    "settings",
    [{"max_prompt_tokens": -1}, {"prompt_sizes": (0, 4)}, {"prompt_sizes": (8, 16), "max_prompt_tokens": 4}],
    ids=["max", "sizes", "both"],
)
def test_impossible_sizes_are_refused(settings):
    with pytest.raises(ConfigError, match="--cuda-graph.*-prefill"):
        GraphConfig(**settings)


def test_shapes_have_room_for_padding():
    assert shape_of(16) == PromptShape(tokens=16, rows=17, extends=9)
    assert shape_of(1024).extends == MAX_EXTENDS + 1


def test_prompts_are_captured_where_attention_and_states_allow():
    """By kernels: torch's attention reads all that a sequence could have, and its states need lengths on the host."""
    plain, here = ToyModel.random().config, torch.device("cpu")
    pool, specs = make_pool(), (AttentionSpec(scale=1.0),) * NUM_LAYERS
    kernels, by_torch = TurningReference(pool, specs=specs), TorchReferenceBackend(pool, specs=specs)
    states = StatePool(
        StateSpec(layers=1, history=3, channels=16, heads=2, key_size=4, value_size=4, dtype=torch.float32),
        rows=2,
        device="cpu",
    )
    assert can_capture_prompts(plain, kernels, here, states=None)
    assert not can_capture_prompts(plain, by_torch, here, states=None)
    assert not can_capture_prompts(plain, kernels, here, states=states)
    with kernels_on("cpu"):
        assert can_capture_prompts(plain, kernels, here, states=states)


def test_graph_with_states_has_room_for_few_prompts():
    room = run_room(shape_of(128))
    assert room == RunRoom(tokens=128, sequences=4, chunks=2 + 8, decodes=128)
    whole = [prompt(64), prompt(1, row=2), *(decode(row) for row in range(3, 7))]
    assert room.holds(RunRoom.of(make_batch(whole)))
    assert not room.holds(RunRoom.of(make_batch([prompt(2, row=row) for row in range(1, 6)])))
    cut = replace(make_batch([prompt(70)]), snapshots=tuple(Snapshot(0, length, 1) for length in range(1, 11)))
    assert not room.holds(RunRoom.of(cut)), "each copy of a state ends a chunk"
