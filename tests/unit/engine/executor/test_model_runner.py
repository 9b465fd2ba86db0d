import itertools

import pytest
import torch

from tandem_engine.attention.cpu import CpuAttention
from tandem_engine.attention.torch_ref import TorchReferenceBackend
from tandem_engine.executor.runner import ModelRunner
from tandem_engine.forward.forward_batch import RESOLVE
from tandem_engine.forward.future_map import FutureMap
from tandem_engine.sampling.sampler import Sampler
from tandem_testing.forward_builders import NUM_HEADS, PageDealer, Seq, make_batch, make_pool, make_sampling
from tandem_testing.toy_model import ToyModel

PROMPT = [5, 17, 80, 3, 44, 9, 61, 23, 2, 2, 90, 31, 7, 50, 12, 76, 8, 19, 33]
PAGES = [9, 4, 30]
ROW = 3


@pytest.fixture(params=["cpu", "reference"])
def runner(request) -> ModelRunner:
    pool = make_pool()
    backend = CpuAttention(pool, num_heads=NUM_HEADS) if request.param == "cpu" else TorchReferenceBackend(pool)
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
def test_chunks_of_a_prompt_generate_what_the_whole_does(runner, chunks):
    expected = generate(runner, [19], 12)
    assert len(set(expected)) > 4
    assert generate(runner, chunks, 12) == expected


@torch.inference_mode()
def test_tokens_resolved_on_the_device_are_those_the_host_would_send(runner):  # T41
    assert generate(runner, [19], 12) == generate(runner, [19], 12, known=True)


@torch.inference_mode()
def test_a_middle_chunk_samples_nothing(runner):
    result = runner.forward(make_batch([extend(0, 7, samples=False)], step=4))
    assert (result.step, result.next_token_ids, result.logprobs) == (4, (), ())
    assert result.compute_s > 0


@torch.inference_mode()
def test_an_idle_step_computes_nothing(runner):
    assert runner.forward(make_batch([], step=6)).step == 6


@torch.inference_mode()
def test_a_mixed_step_gives_each_sequence_its_own_token(runner):  # T20
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
