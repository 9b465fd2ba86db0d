"""Steps of all kinds of sampling, to be sampled by the host and by what is queued on a device."""

import numpy as np
import torch

from tandem_engine.executor.cuda.runner import tensors_of, with_tensors
from tandem_engine.forward.batch import SamplingBatch
from tandem_engine.forward.step_inputs import step_inputs
from tandem_engine.messages.sampling import SamplingParams
from tandem_engine.sampling.device_sampler import QueuedSampler
from tandem_engine.sampling.sampler import Sampler
from tandem_testing.forward_builders import Seq, make_batch, make_sampling

VOCAB = 300
ROWS = 6
PARAMS = [
    SamplingParams(max_tokens=9),
    SamplingParams(max_tokens=9, presence_penalty=1.5, frequency_penalty=0.25, repetition_penalty=1.3),
    SamplingParams(max_tokens=9, bad_words=((3, 5), (7,), (9, 8, 2)), logit_bias=((4, 3.0), (9, -20.0))),
    SamplingParams(max_tokens=9, allowed_token_ids=(3, 7, 11), bad_words=((7,),)),
    SamplingParams(max_tokens=9, allowed_token_ids=(7,), bad_words=((7,),)),
    SamplingParams(max_tokens=9, repetition_penalty=0.5),
]


def random_logits(seed: int) -> torch.Tensor:
    """With many equal values, and a row that means nothing."""
    logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(seed)).mul(8).round().div(4)
    if seed % 3 == 0:
        logits[seed % ROWS, 17] = torch.nan
    return logits


def random_sampling(seed: int, **more: object) -> SamplingBatch:
    random = np.random.default_rng(seed)
    pick = lambda values: [values[i] for i in random.integers(0, len(values), ROWS)]  # noqa: E731
    return make_sampling(
        temperature=pick([0.0, 0.7, 1.0, 2.5]),
        top_k=pick([0, 1, 5, 40, VOCAB + 3]),
        top_p=pick([1.0, 0.9, 0.3]),
        min_p=pick([0.0, 0.02]),
        seed=[*range(ROWS)],
        position=pick([1, 2, 3]),
        **more,
    )


def both(
    logits: torch.Tensor, sampling: SamplingBatch, host: Sampler, queued: QueuedSampler, *, device: str = "cpu"
) -> None:
    """Sample, compare, and record; `queued` on `device`."""
    batch = make_batch(
        [Seq(seq_len=2, decode=True, pages=[1], row=row) for row in range(1, ROWS + 1)], sampling=sampling
    )
    expected = host.sample(logits.clone(), sampling)
    inputs = step_inputs(batch)
    inputs = with_tensors(inputs, [tensor.to(device) for tensor in tensors_of(inputs)])
    masks = None
    if sampling.masks is not None:
        masks = (torch.tensor(sampling.masks.rows, device=device), sampling.masks.wait().to(device))
    found = queued.sample(logits.to(device), inputs, masks)
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    sound_rows = (expected.token_ids >= 0).tolist()  # the others are not read
    pairs = zip(
        found.logprobs.read(found.logprobs.tensors), expected.logprobs, sound_rows, strict=bool(expected.logprobs)
    )
    assert all(mine == theirs for mine, theirs, is_sound in pairs if is_sound)
    sound = expected.token_ids.clamp(min=0)
    host.record(sampling, sound)
    queued.record(inputs, sound[:, None].to(device))
