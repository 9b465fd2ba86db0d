"""Embeddings are the hidden states of transformers after the final norm, whatever way the prompt was computed."""

import numpy as np
import pytest
import torch

from tandem_engine.config import CacheConfig, EngineConfig, SchedulerConfig
from tandem_engine.engine import Engine
from tandem_engine.engine.loaded_model import load
from tandem_engine.messages.requests import GenerateRequest, Pooling, PoolingParams
from tandem_engine.messages.sampling import SamplingParams
from tandem_testing.tiny_checkpoints import VOCAB_SIZE, write_tiny_checkpoint

LENGTHS = (1, 17, 70, 90)


@pytest.fixture(scope="module", params=["qwen3", "gemma3", "granite"])
def checkpoint(request, tmp_path_factory):
    """Computed by us, with windows, and by transformers."""
    return write_tiny_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(8)
    shared = torch.randint(VOCAB_SIZE, (max(LENGTHS),), generator=generator).tolist()
    return [tuple(shared[:length]) for length in LENGTHS]


@pytest.fixture(scope="module")
def hidden_states(checkpoint, prompts) -> list[np.ndarray]:
    from transformers import AutoModel

    model = AutoModel.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).last_hidden_state[0].numpy() for prompt in prompts]


def pool(states: np.ndarray, params: PoolingParams) -> np.ndarray:
    rows = {Pooling.LAST: states[-1:], Pooling.MEAN: states, Pooling.CLS: states[:1]}[params.pooling]
    vector = rows.astype(np.float64).mean(axis=0)[: params.dimensions]
    return vector / np.linalg.norm(vector) if params.normalize else vector


@pytest.mark.parametrize("chunk", [7, 512])
def test_embeddings_are_pooled_hidden_states_of_transformers(checkpoint, prompts, hidden_states, chunk):
    scheduler = SchedulerConfig(chunked_prefill_size=chunk, audit_every_step=True, context_length=256)
    config = EngineConfig(
        model_path=str(checkpoint), dtype="float32", cache=CacheConfig(num_pages=64), scheduler=scheduler
    )
    loaded = load(config, progress=False)
    wanted = [PoolingParams(pooling=pooling) for pooling in Pooling]
    wanted += [PoolingParams(normalize=False), PoolingParams(pooling=Pooling.MEAN, dimensions=24)]
    with Engine.build(loaded, loaded.config) as engine:
        for number, params in enumerate(wanted):
            requests = [
                GenerateRequest(
                    rid=f"{number}-{index}",
                    input_ids=prompt,
                    sampling=SamplingParams(max_tokens=1, temperature=0.0),
                    pooling=params,
                )
                for index, prompt in enumerate(prompts)
            ]
            outputs = engine.generate(requests, steps_between=1)
            for output, states in zip(outputs, hidden_states, strict=True):
                vector = np.frombuffer(output.embedding, dtype="<f4")
                np.testing.assert_allclose(vector, pool(states, params), rtol=1e-4, atol=1e-5)
