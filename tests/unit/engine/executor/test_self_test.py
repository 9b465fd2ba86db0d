from dataclasses import replace

import pytest
import torch

from tandem_engine.base.errors import CheckpointError
from tandem_engine.base.names import PageId
from tandem_engine.executor.runner import ModelRunner
from tandem_engine.executor.self_test import PROMPT_TOKENS, self_test
from tandem_engine.forward.future_map import FutureMap
from tandem_engine.model.attention.cpu import CpuAttention
from tandem_engine.sampling.sampler import Sampler
from tandem_testing.forward_builders import NUM_HEADS, PLAIN, make_pool
from tandem_testing.toy_model import VOCAB_SIZE, ToyModel

PAGES = [PageId(page) for page in range(7, 30)]


def make_runner(model: ToyModel) -> ModelRunner:
    pool = make_pool()
    return ModelRunner(
        model=model,
        pool=pool,
        backend=CpuAttention(pool, num_heads=NUM_HEADS, specs=PLAIN),
        sampler=Sampler(),
        future_map=FutureMap(4, debug=True),
    )


def run(runner: ModelRunner, pages=PAGES, **options):
    return self_test(runner, pages=pages, page_size=16, vocab_size=VOCAB_SIZE, **options)


def test_working_model_is_measured_and_frees_all():
    runner = make_runner(ToyModel.random())
    before = runner.pool.data.clone()
    report = run(runner)
    assert report.prompt_tokens == PROMPT_TOKENS
    assert report.prefill_tokens_per_s > 0
    assert report.decode_step_s > 0
    assert torch.equal(runner.pool.data, before)


def test_prompt_fits_the_pages_and_the_bound():
    runner = make_runner(ToyModel.random())
    assert run(runner, pages=PAGES[:2]).prompt_tokens == 32
    assert run(runner, prompt_tokens=20).prompt_tokens == 20
    assert run(runner, prompt_tokens=1).prompt_tokens == 1


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_fail(value):
    model = ToyModel.random()
    runner = make_runner(replace(model, head=model.head.masked_fill(model.head > 3.0, value)))
    before = runner.pool.data.clone()
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        run(runner)
    assert torch.equal(runner.pool.data, before)


def test_weights_of_zero_fail():
    model = ToyModel.random()
    with pytest.raises(CheckpointError, match="same logit"):
        run(make_runner(replace(model, head=torch.zeros_like(model.head))))
