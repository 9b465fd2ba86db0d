"""Every family, shared by ranks, has the logits of the whole model, and the same bits on every rank."""

import pytest
import torch
from torch import Tensor

from tandem_engine.model.checkpoint import read_model_config
from tandem_engine.model.loader import load_model
from tandem_engine.parallel.group import Parallel
from tandem_testing.dense_attention import DenseAttend, with_states
from tandem_testing.rank_threads import on_ranks
from tandem_testing.tiny_checkpoints import TINY_MODELS, VOCAB_SIZE, write_tiny_checkpoint

ATOL = 1e-4
SIZES = (2, 4)
"""The tiny models have 4 query heads and 2 KV heads: of 4 ranks, two hold each KV head. Neither divides 259 tokens."""


def logits(path, prompt: Tensor, parallel: Parallel) -> Tensor:
    """A prompt of 40 tokens in one step, then its last token in another."""
    model = load_model(path, read_model_config(path), torch.float32, progress=False, group=parallel.forward)
    attend, positions = DenseAttend(specs=model.attention), torch.arange(len(prompt))
    results = []
    with torch.inference_mode():
        for part in (slice(0, 40), slice(40, 41)):
            attend.extend_lens = [len(prompt[part])]
            states = with_states(attend, model, size=parallel.size)
            hidden = model.forward(prompt[part], positions[part], states, torch.arange(len(prompt[part])))
            results.append(model.logits(hidden))
    return torch.cat(results)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_ranks_compute_the_logits_of_the_whole_model(name, tmp_path):
    path = write_tiny_checkpoint(name, tmp_path)
    prompt = torch.randint(VOCAB_SIZE, (41,), generator=torch.Generator().manual_seed(7))
    whole = logits(path, prompt, Parallel())
    for size in SIZES:
        first, *others = on_ranks(size, lambda parallel: logits(path, prompt, parallel))
        torch.testing.assert_close(first, whole, atol=ATOL, rtol=0)
        assert all(torch.equal(first, other) for other in others), "ranks must not drift apart [rank-zero-tokens]"
