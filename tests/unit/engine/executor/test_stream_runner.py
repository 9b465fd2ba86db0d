"""A step on streams comes to what it comes to on the host, and nothing waits for the device in the meantime."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tandem_engine.base.clock import MonotonicClock
from tandem_engine.executor.cuda.streams import StreamFuture
from tandem_engine.executor.self_test import single_sequence_batch
from tandem_engine.forward.batch import RESOLVE, ForwardBatch, ForwardResult, PromptPositions, TokenMasks
from tandem_engine.forward.kv_progress import KvProgress
from tandem_engine.forward.results import PooledTokens
from tandem_engine.messages.sampling import SamplingParams
from tandem_testing.edit_builders import make_edits, make_request
from tandem_testing.forward_builders import NUM_LAYERS, Seq, make_batch, make_sampling
from tandem_testing.simulated_device import HostWaitError, MixedDevicesError
from tandem_testing.stream_builders import Beside
from tandem_testing.toy_model import VOCAB_SIZE, ToyModel

PROMPT = [5, 17, 80, 3, 44, 9, 61, 23, 2, 2, 90, 31, 7, 50, 12, 76, 8, 19, 33]
PAGES, OTHER_PAGES = [9, 4, 30], [12, 7]


def prompt(*, row: int = 3, pages: list[int] = PAGES, length: int = len(PROMPT)) -> Seq:
    return Seq(seq_len=length, extend_len=length, pages=pages, row=row, input_ids=PROMPT[:length])


def decode(seq_len: int, *, row: int = 3, pages: list[int] = PAGES, token: int = RESOLVE) -> Seq:
    return Seq(seq_len=seq_len, decode=True, pages=pages, row=row, input_ids=[token])


@torch.inference_mode()
def on_both(both: Beside, batch: ForwardBatch) -> ForwardResult:
    """The result, which is the same on both but for time."""
    queued, expected = both.streams.forward(batch), both.host.forward(batch)
    assert_same(queued, expected)
    return queued


def assert_same(queued: ForwardResult, expected: ForwardResult) -> None:
    assert queued.next_token_ids == expected.next_token_ids
    assert queued.corrupted == expected.corrupted
    assert [each and each.top for each in queued.logprobs] == [each and each.top for each in expected.logprobs]
    assert queued.prompt_scores == expected.prompt_scores
    for pooled, sums in zip(queued.pooled, expected.pooled, strict=True):
        assert (pooled.sequence, pooled.first, pooled.count) == (sums.sequence, sums.first, sums.count)
        torch.testing.assert_close(pooled.total, sums.total)


@pytest.mark.parametrize("graph_sizes", [(), (1, 4)])
def test_prompt_and_its_decodes(graph_sizes):
    both = Beside(graph_sizes=graph_sizes)
    on_both(both, make_batch([prompt(), prompt(row=5, pages=OTHER_PAGES, length=4)]))
    for step in range(4):
        on_both(both, make_batch([decode(20 + step), decode(5 + step, row=5, pages=OTHER_PAGES)]))
    assert both.platform.replays == (4 if graph_sizes else 0)


def test_mixed_step_with_all_sampling_options_equals_host():
    both = Beside()
    on_both(both, make_batch([prompt()]))
    sampling = make_sampling(
        temperature=[0.8, 0.0, 1.3], top_k=[0, 3, 5], top_p=[0.9, 1.0, 1.0], min_p=[0.0, 0.0, 0.05],
        seed=[1, 2, 3], position=[4, 20, 7], logprobs=(2, -1, 0), suppress=((1, 2), (), (60,)),
        logprob_ids=torch.tensor([[-1, -1], [-1, -1], [7, 60]]),
    )  # fmt: skip
    chunk = prompt(row=5, pages=OTHER_PAGES, length=4)
    batch = make_batch([chunk, prompt(row=6, pages=[20], length=7), decode(20)], sampling=sampling)
    asked = replace(
        batch,
        prompt_positions=(
            PromptPositions(
                sequence=0, first=1, tokens=torch.tensor([0, 1, 2]), token_ids=torch.tensor(PROMPT[1:4]), top=2
            ),
        ),
        pooled=(PooledTokens(sequence=1, first=2, tokens=torch.tensor([6, 7, 8])),),
        page_copies=((9, 40), (4, 41)),
    )
    result = on_both(both, asked)
    assert len(result.prompt_scores[0].logprobs) == 3
    found = [None if logprobs is None else [token for token, _ in logprobs.top] for logprobs in result.logprobs]
    assert (len(found[0]), found[1:]) == (2, [None, [7, 60]])
    assert torch.equal(both.streams.pool.data[40], both.streams.pool.data[9])


@pytest.mark.parametrize("graph_sizes", [(), (8,)])
def test_draft_runs_record_their_inputs(graph_sizes):
    both = Beside(graph_sizes=graph_sizes)
    penalized = make_request(
        3, SamplingParams(max_tokens=9, presence_penalty=1.5, repetition_penalty=2.0), prompt=PROMPT
    )
    edits = make_edits([penalized])
    on_both(both, make_batch([prompt()], sampling=make_sampling(temperature=[0.0], all_greedy=True, edits=edits)))
    sampling = make_sampling(temperature=[0.0] * 3, all_greedy=True, edits=replace(edits, histories=()))
    run = Seq(seq_len=22, extend_len=3, pages=PAGES, row=3, input_ids=[41, 5, 17])
    batch = replace(make_batch([run], sampling=sampling), draft_lens=(2,))
    result = on_both(both, batch)
    accepted = torch.tensor([[result.next_token_ids[0], -1, -1]])
    both.streams.record(batch, accepted)
    with torch.inference_mode():
        both.host.record(batch, accepted)
    token = result.next_token_ids[0]
    again = make_sampling(temperature=[0.0], all_greedy=True, edits=replace(edits, histories=()))
    on_both(both, make_batch([decode(21, token=token)], sampling=again))
    assert both.platform.replays == (2 if graph_sizes else 0)


def masks_for(rows: tuple[int, ...], *allowed: int) -> TokenMasks:
    masks = TokenMasks.open(rows, -(-VOCAB_SIZE // 32))
    words = masks.bitmask
    words[:] = 0
    for token in allowed:
        words[:, token // 32] |= 1 << token % 32
    return masks


@torch.inference_mode()
def test_stream_step_with_grammar_launches_before_masks_fill():  # [masks-after-settling]
    both = Beside()
    masks = masks_for((0,), 7, 33)
    batch = make_batch([prompt()], sampling=make_sampling(temperature=[0.0], all_greedy=True, masks=masks))
    future = StreamFuture(both.streams.enqueue(batch))
    assert [future.done() for _ in range(5)] == [False] * 5
    masks.release()
    assert future.result().next_token_ids == both.host.forward(batch).next_token_ids
    assert future.result().next_token_ids[0] in (7, 33)


@torch.inference_mode()
def test_mask_error_is_raised_by_the_result():
    both = Beside()
    masks = TokenMasks(rows=(0,), bitmask=torch.zeros(1, 4, 4, dtype=torch.int32))
    batch = make_batch([prompt()], sampling=make_sampling(temperature=[0.0], all_greedy=True, masks=masks))
    future = StreamFuture(both.streams.enqueue(batch))
    masks.release()
    assert future.done()
    with pytest.raises((IndexError, RuntimeError)):
        future.result()


@torch.inference_mode()
def test_layers_count_as_written_when_the_stream_got_there():  # [settled-only-sent]
    both = Beside()
    progress = KvProgress(MonotonicClock())
    queued = both.streams.enqueue(replace(make_batch([prompt()]), kv_progress=progress))
    assert progress.layers == 0
    while not queued.arrived():
        pass
    seen = {progress.layers for _ in range(3 * NUM_LAYERS)}
    assert max(seen) == NUM_LAYERS


class BrokenModel(ToyModel):
    """Gives the first row of logits a number that means nothing."""

    def logits(self, hidden: Tensor) -> Tensor:
        logits = super().logits(hidden)
        return logits.index_fill(0, torch.zeros(1, dtype=torch.int64, device=logits.device), torch.nan)


def test_token_that_means_nothing_is_marked_and_the_others_stand():
    toy = ToyModel.random()
    both = Beside(model=BrokenModel(embedding=toy.embedding, position=toy.position, head=toy.head))
    result = on_both(both, make_batch([prompt(), prompt(row=5, pages=OTHER_PAGES, length=4)]))
    assert result.corrupted == (0,)
    assert result.next_token_ids[0] == 0


class WaitingModel(ToyModel):
    def forward(self, input_ids: Tensor, positions: Tensor, attend, wanted: Tensor) -> Tensor:
        assert int(positions.max()) < 1024
        return super().forward(input_ids, positions, attend, wanted)


class MixingModel(ToyModel):
    def forward(self, input_ids: Tensor, positions: Tensor, attend, wanted: Tensor) -> Tensor:
        return super().forward(input_ids, positions + torch.zeros(len(positions), dtype=torch.int64), attend, wanted)


@pytest.mark.parametrize(("kind", "error"), [(WaitingModel, HostWaitError), (MixingModel, MixedDevicesError)])
def test_launch_that_syncs_or_mixes_devices_raises(kind, error):  # [no-device-wait]
    toy = ToyModel.random()
    both = Beside(model=kind(embedding=toy.embedding, position=toy.position, head=toy.head))
    with pytest.raises(error), torch.inference_mode():
        both.streams.enqueue(make_batch([prompt()]))


@torch.inference_mode()
def test_chunked_text_logits_equal_prompt_logits_on_both_runners():
    """`tandem accuracy` takes them so: every token of a chunk, on the KV of those before it."""
    both, text = Beside(), torch.tensor(PROMPT)
    whole = single_sequence_batch(text, PAGES, 16, extend_len=len(text), every_token=True)
    chunks = [
        single_sequence_batch(text[:end], PAGES, 16, extend_len=size, every_token=True)
        for end, size in ((8, 8), (18, 10), (19, 1))
    ]
    expected = both.host.logits(whole)
    assert expected.shape == (len(text), VOCAB_SIZE)
    for runner in (both.host, both.streams):
        torch.testing.assert_close(torch.cat([runner.logits(chunk) for chunk in chunks]), expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(runner.logits(single_sequence_batch(text, PAGES, 16, extend_len=19)), expected[-1:])
