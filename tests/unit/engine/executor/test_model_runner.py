import itertools
from dataclasses import replace

import pytest
import torch

from tandem_engine.base.clock import MonotonicClock
from tandem_engine.executor.runner import ModelRunner
from tandem_engine.forward.batch import RESOLVE, PromptPositions
from tandem_engine.forward.future_map import FutureMap
from tandem_engine.forward.kv_progress import KvProgress
from tandem_engine.messages.sampling import SamplingParams
from tandem_engine.model.attention.cpu import CpuAttention
from tandem_engine.model.attention.reference import TorchReferenceBackend
from tandem_engine.sampling.sampler import Sampler
from tandem_testing.edit_builders import make_edits, make_request, settled
from tandem_testing.forward_builders import NUM_HEADS, PLAIN, PageDealer, Seq, make_batch, make_pool, make_sampling
from tandem_testing.plain_sampling import edited_logits, most_likely_token
from tandem_testing.toy_model import ToyModel

PROMPT = [5, 17, 80, 3, 44, 9, 61, 23, 2, 2, 90, 31, 7, 50, 12, 76, 8, 19, 33]
PAGES = [9, 4, 30]
ROW = 3


@pytest.fixture(params=["cpu", "reference"])
def runner(request) -> ModelRunner:
    pool = make_pool()
    backend = (
        CpuAttention(pool, num_heads=NUM_HEADS, specs=PLAIN)
        if request.param == "cpu"
        else TorchReferenceBackend(pool, specs=PLAIN)
    )
    return ModelRunner(
        model=ToyModel.random(),
        pool=pool,
        backend=backend,
        sampler=Sampler(),
        future_map=FutureMap(8, debug=True),
    )


def extend(start: int, stop: int, *, samples: bool = True) -> Seq:
    return Seq(
        seq_len=stop, extend_len=stop - start, pages=PAGES, row=ROW, input_ids=PROMPT[start:stop], samples=samples
    )


def decode(seq_len: int, token: int = RESOLVE) -> Seq:
    return Seq(seq_len=seq_len, decode=True, pages=PAGES, row=ROW, input_ids=[token])


def generate(runner: ModelRunner, chunks: list[int], count: int, *, known: bool = False) -> list[int]:
    """Greedy tokens after PROMPT computed in `chunks`; decode inputs resolved on the device unless `known`."""
    edges = list(itertools.accumulate(chunks, initial=0))
    for start, stop in itertools.pairwise(edges):
        result = runner.forward(make_batch([extend(start, stop, samples=stop == len(PROMPT))]))
    tokens = list(result.next_token_ids)
    while len(tokens) < count:
        seq = decode(len(PROMPT) + len(tokens), tokens[-1] if known else RESOLVE)
        tokens += runner.forward(make_batch([seq])).next_token_ids
    return tokens


@torch.inference_mode()
@pytest.mark.parametrize("chunks", [[10, 9], [1] * 19, [18, 1]])
def test_chunked_prompt_generates_as_the_whole(runner, chunks):
    expected = generate(runner, [19], 12)
    assert len(set(expected)) > 4
    assert generate(runner, chunks, 12) == expected


@torch.inference_mode()
def test_tokens_resolved_on_device_equal_tokens_of_host(runner):  # [device-history]
    assert generate(runner, [19], 12) == generate(runner, [19], 12, known=True)


@torch.inference_mode()
def test_middle_chunk_samples_nothing(runner):
    result = runner.forward(make_batch([extend(0, 7, samples=False)], step=4))
    assert (result.step, result.next_token_ids, result.logprobs) == (4, (), ())
    assert result.compute_s > 0


@torch.inference_mode()
def test_idle_step_computes_nothing(runner):
    assert runner.forward(make_batch([], step=6)).step == 6


@torch.inference_mode()
def test_mixed_step_gives_each_sequence_its_own_token(runner):  # [mixed-equals-apart]
    first, second = generate(runner, [19], 2)
    other = PageDealer(pool=runner.pool)
    other.pages = [page for page in other.pages if page not in PAGES]
    prompt = Seq(seq_len=6, extend_len=6, pages=other.seq(6).pages, row=5, input_ids=PROMPT[:6])
    chunk = Seq(seq_len=4, extend_len=4, pages=other.seq(4).pages, row=6, input_ids=PROMPT[:4], samples=False)
    alone = runner.forward(make_batch([prompt])).next_token_ids
    mixed = runner.forward(make_batch([chunk, prompt, decode(20, first)]))
    assert mixed.next_token_ids == (*alone, second)


@torch.inference_mode()
def test_logprobs_reach_the_host(runner):
    sampling = make_sampling(temperature=[0.0], logprobs=(3,), all_greedy=True)
    result = runner.forward(make_batch([extend(0, 19)], sampling=sampling))
    logprobs = result.logprobs[0]
    assert logprobs.top[0] == (result.next_token_ids[0], logprobs.logprob)
    assert len(logprobs.top) == 3


def positions(first: int, stop: int, *, offset: int = 0, sequence: int = 0, top: int = 0) -> PromptPositions:
    """Tokens [first, stop) of PROMPT, in a step whose token `offset` is the prompt's first."""
    before = torch.arange(first, stop) - 1 + offset
    ids = torch.tensor(PROMPT[first:stop])
    return PromptPositions(sequence=sequence, first=first, tokens=before, token_ids=ids, top=top)


def scored(runner: ModelRunner, seqs: list[Seq], *wanted: PromptPositions):
    return runner.forward(replace(make_batch(seqs), prompt_positions=wanted))


@torch.inference_mode()
@pytest.mark.parametrize("max_rows", [1, 3, 18, 256])
def test_prompt_logprobs_are_equal_for_any_projection_size(runner, monkeypatch, max_rows):
    every = [
        runner.logits(make_batch([replace(extend(0, stop), seq_len=stop)]))[0].log_softmax(0) for stop in range(1, 19)
    ]
    monkeypatch.setattr("tandem_engine.sampling.logprobs.MAX_ROWS", max_rows)
    result = scored(runner, [extend(0, 19)], positions(1, 19, top=2))
    [scores] = result.prompt_scores
    assert (scores.sequence, scores.first, len(scores.logprobs)) == (0, 1, 18)
    for truth, token, found in zip(every, PROMPT[1:], scores.logprobs, strict=True):
        assert found.logprob == pytest.approx(truth[token].item(), abs=1e-4)
        assert found.rank == 1 + int((truth > truth[token]).sum())
        assert [value for _, value in found.top] == pytest.approx(truth.topk(2).values.tolist(), abs=1e-4)
    assert len(result.next_token_ids) == 1


@torch.inference_mode()
def test_chunk_that_samples_nothing_is_scored_all_the_same(runner):  # [logprobs-through-chunks]
    [whole] = scored(runner, [extend(0, 19)], positions(1, 19)).prompt_scores
    first = scored(runner, [extend(0, 7, samples=False)], positions(1, 8))
    assert first.next_token_ids == ()
    rest = scored(runner, [extend(7, 19)], positions(8, 19, offset=-7))
    logprobs = [entry.logprob for result in (first, rest) for entry in result.prompt_scores[0].logprobs]
    assert logprobs == pytest.approx([entry.logprob for entry in whole.logprobs], abs=1e-4)


@torch.inference_mode()
def test_scoring_one_sequence_changes_no_token_of_another(runner):
    other = PageDealer(pool=runner.pool)
    other.pages = [page for page in other.pages if page not in PAGES]
    prompt = Seq(seq_len=6, extend_len=6, pages=other.seq(6).pages, row=5, input_ids=PROMPT[:6])
    plain = scored(runner, [prompt, extend(0, 19)])
    with_scores = scored(runner, [prompt, extend(0, 19)], positions(4, 10, offset=6, sequence=1))
    assert with_scores.next_token_ids == plain.next_token_ids
    assert with_scores.prompt_scores[0].sequence == 1
    [whole] = scored(runner, [extend(0, 19)], positions(1, 19)).prompt_scores
    found = [entry.logprob for entry in with_scores.prompt_scores[0].logprobs]
    assert found == pytest.approx([entry.logprob for entry in whole.logprobs[3:9]], abs=1e-4)


@torch.inference_mode()
def test_penalty_sees_the_tokens_of_steps_before(runner):  # [device-history]
    plain = generate(runner, [19], 12)
    params = SamplingParams(max_tokens=12, presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=2.0)
    request = make_request(ROW, params, prompt=PROMPT)
    sampling = make_sampling(temperature=[0.0], all_greedy=True, edits=make_edits([request]))
    tokens = [*runner.forward(make_batch([extend(0, 19)], sampling=sampling)).next_token_ids]
    later = make_sampling(temperature=[0.0], all_greedy=True, edits=settled(sampling.edits))
    while len(tokens) < 12:
        tokens += runner.forward(make_batch([decode(19 + len(tokens))], sampling=later)).next_token_ids
    assert tokens == _penalized_by_hand(runner, params)
    assert tokens != plain


def _penalized_by_hand(runner: ModelRunner, params: SamplingParams) -> list[int]:
    """One forward over the whole history for each token."""
    outputs: list[int] = []
    while len(outputs) < params.max_tokens:
        ids = [*PROMPT, *outputs]
        whole = Seq(seq_len=len(ids), extend_len=len(ids), pages=PAGES, row=ROW, input_ids=ids)
        logits = runner.logits(make_batch([whole]))[0].tolist()
        outputs.append(most_likely_token(edited_logits(logits, params, prompt=PROMPT, outputs=outputs)))
    return outputs


@torch.inference_mode()
def test_kv_progress_reports_each_layer_after_its_kv_is_written(runner):  # [settled-only-sent]
    reported: list[tuple[int, bool]] = []

    class Listener(KvProgress):
        def wrote(self, layer: int) -> None:
            reported.append((layer, bool(runner.pool.data[PAGES, layer].any(dim=-1)[0].all())))

    batch = make_batch([extend(0, len(PROMPT))])
    runner.forward(replace(batch, kv_progress=Listener(MonotonicClock())))
    assert reported == [(layer, True) for layer in range(runner.pool.layout.layers)]
