"""`POST /v1/embeddings` as OpenAI's clients use it."""

import asyncio
import base64
import struct

import pytest
from openai import AsyncOpenAI

from tandem_engine.config import Role
from tandem_engine.messages.outputs import Finish, FinishReason
from tandem_engine.messages.requests import Pooling, PoolingParams
from tandem_testing.gateway_builders import live_gateway
from tandem_testing.mock_engine import MockBehavior, hash_tokens, mock_vector

PATH = "/v1/embeddings"


async def embed(gateway, given="hi", **fields):
    return await gateway.http.post(PATH, json={"model": "mock", "input": given, **fields})


def vectors(answer) -> list[list[float]]:
    return [item["embedding"] for item in answer.json()["data"]]


async def test_answer_has_the_shape_of_openai(gateway, tokenizer):
    answer = await embed(gateway)
    ids = tokenizer.encode("hi", add_special_tokens=True)
    assert answer.status_code == 200
    assert answer.json() == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": mock_vector(ids)}],
        "model": "mock",
        "usage": {"prompt_tokens": len(ids), "total_tokens": len(ids)},
    }


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
        ([[9]] * 40, [[9]] * 40),
    ],
)
async def test_token_ids_are_embedded_as_they_are_and_in_order(gateway, given, inputs):
    answer = await embed(gateway, given)
    assert vectors(answer) == [mock_vector(ids) for ids in inputs]
    assert [item["index"] for item in answer.json()["data"]] == list(range(len(inputs)))
    assert answer.json()["usage"]["prompt_tokens"] == sum(map(len, inputs))


async def test_texts_and_ids_may_stand_in_one_list(gateway, tokenizer):
    answer = await embed(gateway, ["hi", [5, 6]])
    assert vectors(answer) == [mock_vector(tokenizer.encode("hi", add_special_tokens=True)), mock_vector([5, 6])]


async def test_base64_is_little_endian_float32(gateway):
    encoded = vectors(await embed(gateway, [5, 6, 7], encoding_format="base64"))[0]
    assert list(struct.unpack("<3f", base64.b64decode(encoded))) == mock_vector([5, 6, 7])


async def test_embedding_options_reach_the_engine(gateway, rack):
    await embed(gateway, [5], dimensions=2, pooling="mean", normalize=False, cache_salt="s", priority=3)
    (request,) = rack.engines[0].received
    assert request.pooling == PoolingParams(pooling=Pooling.MEAN, normalize=False, dimensions=2)
    assert (request.sampling.max_tokens, request.cache_salt, request.priority) == (1, "s", 3)


async def test_openai_client_decodes_what_it_asked_for_by_default(gateway):
    async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="unused") as client:
        answer = await client.embeddings.create(model="mock", input=[[5, 6, 7], [8]])
    assert [item.embedding for item in answer.data] == [mock_vector([5, 6, 7]), mock_vector([8])]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [""]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [1, "a"]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": [10**9]}, "input"),
        ({"input": [[5]] * 2049}, "input"),
        ({"input": [5] * 512}, "input"),
        ({"input": None}, "input"),
        ({"input": {"text": "x"}}, "input"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": "3"}, "dimensions"),
        ({"dimensions": 2**31}, "dimensions"),
        ({"pooling": "max"}, "pooling"),
        ({"user": "x" * 513}, "user"),
    ],
)
async def test_bad_request_is_refused_by_name_and_reaches_no_engine(gateway, rack, fields, param):
    answer = await gateway.http.post(PATH, json={"model": "mock", "input": "hi", **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert not rack.engines[0].received


async def test_oversized_embedding_dimensions_return_400(gateway, rack):
    answer = await gateway.http.post(PATH, json={"model": "mock", "input": "hi", "dimensions": 10**30})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "dimensions")
    assert not rack.engines[0].received


async def test_refusal_of_the_engine_is_the_clients_fault(gateway, rack):
    rack.engines[0].behavior.refuse = Finish(
        reason=FinishReason.ERROR,
        error="dimensions are up to 64",
        code="invalid_request",
        param="dimensions",
    )
    answer = await embed(gateway, [[5], [6]], dimensions=99)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "dimensions"


async def test_unknown_model_is_not_found(gateway):
    assert (await embed(gateway, model="other")).status_code == 404


async def test_prefill_worker_computes_it_alone(rack, tokenizer):
    behavior = MockBehavior(token=hash_tokens(3, 250))
    rack.add("p", behavior, Role.PREFILL)
    rack.add("d", behavior, Role.DECODE)
    async with live_gateway(rack.context, tokenizer, rack.engines) as live:
        assert vectors(await embed(live, [5, 6])) == [mock_vector([5, 6])]
        assert live.chooser.open == 0
    prefill, decode = rack.engines
    assert [request.handoff for request in prefill.received] == [None]
    assert not decode.received


async def test_lost_worker_is_replaced(rack, tokenizer):
    rack.add("dying", MockBehavior(token=hash_tokens(3, 250), die_after=0))
    rack.add("well", MockBehavior(token=hash_tokens(3, 250)))
    async with live_gateway(rack.context, tokenizer, rack.engines) as live:
        assert vectors(await embed(live, [[5], [6], [7]])) == [mock_vector([i]) for i in (5, 6, 7)]
        assert live.chooser.open == 0


async def test_client_that_leaves_aborts_what_is_under_way(rack, tokenizer):
    engine = rack.add("slow", MockBehavior(token=hash_tokens(3, 250), mute=True))
    async with live_gateway(rack.context, tokenizer, rack.engines) as live:
        task = asyncio.create_task(embed(live, [[5], [6]]))
        assert await asyncio.to_thread(engine.wait_until, lambda: len(engine.received) == 2)
        task.cancel()
        assert await asyncio.to_thread(engine.wait_until, lambda: len(engine.aborted) == 2)
        assert live.chooser.open == 0
