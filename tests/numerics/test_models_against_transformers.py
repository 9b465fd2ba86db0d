"""Logits of every family and rotary scaling equal those of transformers, whole, chunked and decoded."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tandem_engine.model.base import CausalLM
from tandem_engine.model.checkpoint import read_model_config
from tandem_engine.model.config_fields import read_rope
from tandem_engine.model.layers.attention import attention_scale, inverse_frequencies
from tandem_engine.model.loader import load_model
from tandem_lab.verify.reference import cache_field
from tandem_testing.dense_attention import DenseAttend, with_states
from tandem_testing.tiny_checkpoints import TINY_MODELS, VOCAB_SIZE, write_tiny_checkpoint

ATOL = 1e-4


@dataclass
class Pair:
    """The same weights in both implementations."""

    name: str
    ours: CausalLM
    theirs: torch.nn.Module


def load_pair(name: str, path: Path, dtype: torch.dtype) -> Pair:
    from transformers import AutoModelForCausalLM

    ours = load_model(path, read_model_config(path), dtype, progress=False)
    # Eager, because transformers up to 5.17 lets torch's fused attention forget Gemma's cap.
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()
    return Pair(name=name, ours=ours, theirs=theirs)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module", params=TINY_MODELS)
def pair(request, checkpoints) -> Pair:
    path = write_tiny_checkpoint(request.param, checkpoints / request.param)
    return load_pair(request.param, path, torch.float32)


def random_prompt(length: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed))


def dense(model: CausalLM, *extend_lens: int) -> DenseAttend:
    return DenseAttend(specs=model.attention, extend_lens=[*extend_lens])


def extend(model: CausalLM, attend: DenseAttend, ids: list[Tensor], starts: list[int]) -> Tensor:
    """Logits of all tokens of one step that appends `ids[i]` to sequence i, which has `starts[i]` tokens."""
    attend.extend_lens = [len(part) for part in ids]
    positions = torch.cat([torch.arange(start, start + len(part)) for start, part in zip(starts, ids, strict=True)])
    with torch.inference_mode():
        hidden = model.forward(torch.cat(ids), positions, with_states(attend, model), torch.arange(len(positions)))
        return model.logits(hidden)


def reference(model: torch.nn.Module, ids: Tensor) -> Tensor:
    with torch.inference_mode():
        return model(ids[None], use_cache=False).logits[0]


def test_whole_prompt_has_the_logits_of_transformers(pair):
    ids = random_prompt(60)
    logits = extend(pair.ours, dense(pair.ours), [ids], [0])
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, reference(pair.theirs, ids), atol=ATOL, rtol=0)


def test_sequences_of_one_step_do_not_see_each_other(pair):
    first, second = random_prompt(17, seed=1), random_prompt(23, seed=2)
    logits = extend(pair.ours, dense(pair.ours), [first, second], [0, 0])
    expected = torch.cat((reference(pair.theirs, first), reference(pair.theirs, second)))
    torch.testing.assert_close(logits, expected, atol=ATOL, rtol=0)


def test_prompt_computed_in_chunks_has_the_logits_of_the_whole(pair):
    ids = random_prompt(60, seed=3)
    attend, start, parts = dense(pair.ours), 0, []
    for size in (7, 1, 32, 20):
        parts.append(extend(pair.ours, attend, [ids[start : start + size]], [start]))
        start += size
    torch.testing.assert_close(torch.cat(parts), reference(pair.theirs, ids), atol=ATOL, rtol=0)


def test_greedy_tokens_match_transformers_past_original_context(pair):
    """Decodes from position 40 to 100: beyond the 64 positions that some of the rotary scalings start from."""
    from transformers import DynamicCache

    ids = step = random_prompt(40, seed=4)
    attend, cache, start, produced = dense(pair.ours), DynamicCache(config=pair.theirs.config), 0, []
    field = cache_field(pair.theirs)
    with torch.inference_mode():
        for _ in range(60):
            logits = extend(pair.ours, attend, [step], [start])[-1]
            expected = pair.theirs(ids[None, start:], use_cache=True, **{field: cache}).logits[0, -1]
            torch.testing.assert_close(logits, expected, atol=ATOL, rtol=0)
            start, step = len(ids), logits.argmax(keepdim=True)
            ids = torch.cat((ids, step))
            produced.append(int(step))
            assert produced[-1] == int(expected.argmax())
    assert len(set(produced)) > 10, f"the output is degenerate and proves little: {produced}"


def test_logits_are_computed_for_requested_tokens_only(pair):
    ids = random_prompt(20, seed=5)
    whole = extend(pair.ours, dense(pair.ours), [ids], [0])
    with torch.inference_mode():
        for index in ([19], [3, 11, 4], []):
            wanted = torch.tensor(index, dtype=torch.int64)
            hidden = pair.ours.forward(ids, torch.arange(20), with_states(dense(pair.ours, 20), pair.ours), wanted)
            logits = pair.ours.logits(hidden)
            assert logits.shape == (len(index), VOCAB_SIZE)
            torch.testing.assert_close(logits, whole[wanted], atol=1e-5, rtol=0)


BFLOAT16 = ["llama-bias", "qwen2", "qwen3", "gemma2", "gemma3", "qwen3-moe", "olmo3", "cohere2", "glm4", "glm4-moe"]


@pytest.mark.parametrize("name", BFLOAT16)
def test_bfloat16_rounds_like_transformers(name, checkpoints):
    path = write_tiny_checkpoint(name, checkpoints / f"{name}-bfloat16")
    pair = load_pair(name, path, torch.bfloat16)
    exact = load_pair(name, path, torch.float32)
    ids = random_prompt(40, seed=6)
    theirs = reference(pair.theirs, ids).float()
    ours = extend(pair.ours, dense(pair.ours), [ids], [0])
    truth = reference(exact.theirs, ids)
    assert (ours - truth).norm() < 1.1 * (theirs - truth).norm()


ROPE_PARAMETERS = [
    {"rope_type": "default", "rope_theta": 5e5},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5},
    {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0},
    {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 512},
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "truncate": False, "beta_fast": 16, "beta_slow": 2},
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "attention_factor": 0.8},
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.1},
]


@pytest.mark.parametrize("parameters", ROPE_PARAMETERS, ids=lambda parameters: parameters["rope_type"])
@pytest.mark.parametrize("head_dim", [16, 128])
def test_rotary_frequencies_are_those_of_transformers(parameters, head_dim):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    from tandem_engine.model.config_fields import ConfigFields

    config = LlamaConfig(head_dim=head_dim, max_position_embeddings=1024, rope_parameters=dict(parameters))
    theirs = LlamaRotaryEmbedding(config)
    fields = ConfigFields(path=Path("config.json"), values={"rope_parameters": dict(parameters)})
    rope = read_rope(fields, max_position=1024)
    ours = inverse_frequencies(rope, head_dim=head_dim)
    torch.testing.assert_close(ours, theirs.inv_freq, atol=0, rtol=1e-6)
    assert attention_scale(rope) == pytest.approx(theirs.attention_scaling)
