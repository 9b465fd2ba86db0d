"""Requests for embeddings, and the vectors that the fake model owes for them."""

import struct
from collections.abc import Sequence

import numpy as np

from tandem_engine.messages.requests import GenerateRequest, Pooling, PoolingParams
from tandem_engine.messages.sampling import SamplingParams
from tandem_testing.fake_executor import hidden_state
from tandem_testing.scheduler_builders import Engine


def make_embedding_request(rid: str, prompt: Sequence[int], pooling: Pooling, **params: object) -> GenerateRequest:
    return GenerateRequest(
        rid=rid,
        input_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=1, temperature=0.0),
        pooling=PoolingParams(pooling=pooling, **params),
    )


def floats(vector: bytes | None) -> list[float]:
    assert vector is not None, "no embedding came"
    return [*struct.unpack(f"<{len(vector) // 4}f", vector)]


def expected_embedding(message: GenerateRequest) -> list[float]:
    """Pooled the plain way, from the whole prompt at once."""
    params, prompt = message.pooling, message.input_ids
    assert params is not None, f"{message.rid} wants no embedding"
    stop = 1 if params.pooling is Pooling.CLS else len(prompt)
    start = stop - 1 if params.pooling is Pooling.LAST else 0
    states = [hidden_state(prompt[: position + 1]).numpy() for position in range(start, stop)]
    vector = np.mean(states, axis=0)[: params.dimensions]
    if params.normalize:
        vector = vector / np.linalg.norm(vector)
    return vector.astype(np.float32).tolist()


def received_embedding(engine: Engine, rid: str) -> list[float]:
    """The one that came, with the last output of the request."""
    *earlier, last = engine.received[rid].outputs
    assert all(output.embedding is None for output in earlier), f"{rid} was embedded twice"
    return floats(last.embedding)
