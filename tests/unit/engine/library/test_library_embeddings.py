"""`embed` of the library on the bundled model."""

import math
from pathlib import Path

import pytest

from tandem_engine import LLM, AsyncLLM, PoolingParams
from tandem_engine.base.errors import InvalidRequestError
from tandem_engine.messages.requests import Pooling

MODEL = Path(__file__).resolve().parents[4] / "models" / "tandem-mini"
OPTIONS = {"progress": False, "dtype": "float32", "num_pages": 300, "threads": 1, "max_queued_requests": 4}
PROMPTS = ["The fox ran", "A river froze", "Once upon a time there was a fox", "x", "y", "z", "u"]


@pytest.fixture(scope="module")
def llm():
    with LLM(MODEL, **OPTIONS) as llm:
        yield llm


def test_embeddings_follow_prompt_order_and_are_normalized(llm):
    outputs = llm.embed(PROMPTS, use_tqdm=False)
    assert [output.prompt for output in outputs] == PROMPTS
    for output in outputs:
        assert output.prompt_token_ids == tuple(llm.get_tokenizer().encode(output.prompt))
        assert math.dist(output.outputs.embedding, [0.0] * len(output.outputs.embedding)) == pytest.approx(1.0)
    assert len({tuple(output.outputs.embedding) for output in outputs}) == len(PROMPTS)


def test_pooling_parameters_select_the_vector(llm):
    [last] = llm.embed("The fox ran", PoolingParams(normalize=False), use_tqdm=False)
    [cut] = llm.embed("The fox ran", PoolingParams(normalize=False, dimensions=3), use_tqdm=False)
    [mean] = llm.embed("The fox ran", PoolingParams(pooling=Pooling.MEAN, normalize=False), use_tqdm=False)
    assert cut.outputs.embedding == pytest.approx(last.outputs.embedding[:3])
    assert mean.outputs.embedding != pytest.approx(last.outputs.embedding)


@pytest.mark.parametrize(
    ("prompts", "params", "text"),
    [
        (["good", ""], None, "prompt 1: the prompt is empty"),
        ("good", PoolingParams(dimensions=0), "dimensions must be between 1 and"),
        ([[1] * 5000], None, "the prompt has 5000 tokens"),
    ],
)
def test_input_without_embedding_is_rejected_at_once(llm, prompts, params, text):
    before = llm.stats().prompt_tokens_total
    with pytest.raises(InvalidRequestError, match=text):
        llm.embed(prompts, params, use_tqdm=False)
    assert llm.stats().prompt_tokens_total == before


async def test_async_llm_gives_the_same_vectors(llm):
    async with AsyncLLM(MODEL, **OPTIONS) as async_llm:
        output = await async_llm.embed("The fox ran")
        [ours] = llm.embed("The fox ran", use_tqdm=False)
        assert output.outputs.embedding == pytest.approx(ours.outputs.embedding, abs=1e-6)
        with pytest.raises(InvalidRequestError, match="dimensions"):
            await async_llm.embed("The fox ran", PoolingParams(dimensions=10**6))
