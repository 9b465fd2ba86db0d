"""Greedy output with edited logits equals that of transformers' own `generate` with its own processors."""

from collections import Counter

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from tandem_engine.config import CacheConfig, EngineConfig, SchedulerConfig
from tandem_engine.engine import Engine
from tandem_engine.engine.loaded_model import load
from tandem_engine.messages.requests import GenerateRequest
from tandem_engine.messages.sampling import SamplingParams
from tandem_testing.tiny_checkpoints import VOCAB_SIZE, write_tiny_checkpoint

TOKENS = 24
PROMPTS = [
    torch.randint(VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (1, 6, 17, 40)
]


class OutputPenalties(LogitsProcessor):
    """Presence and frequency penalties, one token at a time."""

    def __init__(self, prompt_len: int, presence: float, frequency: float) -> None:
        self.prompt_len, self.presence, self.frequency = prompt_len, presence, frequency

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        scores = scores.clone()
        for token, count in Counter(input_ids[0, self.prompt_len :].tolist()).items():
            scores[0, token] -= self.frequency * count + self.presence
        return scores


class InOutput(LogitsProcessor):
    """A processor that is shown the output, and before it an id that is no token."""

    def __init__(self, processor: LogitsProcessor, prompt_len: int) -> None:
        self.processor, self.prompt_len = processor, prompt_len

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        nothing = torch.full((1, 1), -1)
        return self.processor(torch.cat((nothing, input_ids[:, self.prompt_len :]), dim=1), scores)


CASES = {
    "repetition": {"repetition_penalty": 1.4},
    "repetition rewarded": {"repetition_penalty": 0.7},
    "presence": {"presence_penalty": 1.2},
    "frequency": {"frequency_penalty": 0.7},
    "bias": {"logit_bias": tuple((token, 4.0 if token % 2 else -100.0) for token in range(0, 120, 5))},
    "bad words": {"bad_words": tuple((token,) for token in range(0, 200, 3))},
    "all": {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "logit_bias": ((17, 3.0), (80, 2.0), (200, -2.0)),
        "bad_words": ((80,), *((token, 17) for token in range(100))),
    },
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_tiny_checkpoint("qwen3", tmp_path_factory.mktemp("edited"))


@pytest.fixture(scope="module")
def theirs(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def ours(path):
    config = EngineConfig(
        model_path=str(path),
        dtype="float32",
        cache=CacheConfig(page_size=16, num_pages=64),
        scheduler=SchedulerConfig(
            context_length=96, chunked_prefill_size=16, force_retract_every=5, max_retractions=10_000
        ),
    )
    with Engine.build((loaded := load(config, progress=False)), loaded.config) as engine:
        yield engine


def processors(params: SamplingParams, prompt_len: int) -> LogitsProcessorList:
    chain = [
        RepetitionPenaltyLogitsProcessor(params.repetition_penalty),
        OutputPenalties(prompt_len, params.presence_penalty, params.frequency_penalty),
    ]
    if params.logit_bias:
        chain.append(SequenceBiasLogitsProcessor({(token,): bias for token, bias in params.logit_bias}))
    if params.bad_words:
        chain.append(InOutput(NoBadWordsLogitsProcessor([list(word) for word in params.bad_words]), prompt_len))
    return LogitsProcessorList(chain)


def generate(model: torch.nn.Module, prompt: list[int], params: SamplingParams | None) -> tuple[int, ...]:
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        logits_processor=processors(params, len(prompt)) if params else LogitsProcessorList(),
        do_sample=False,
        max_new_tokens=TOKENS,
        eos_token_id=None,
    )
    return tuple(output[0, len(prompt) :].tolist())


@pytest.mark.parametrize("edits", CASES.values(), ids=CASES)
def test_greedy_output_with_edits_matches_transformers(ours, theirs, edits):
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True, **edits)
    requests = [GenerateRequest(rid=f"{i}", input_ids=tuple(p), sampling=params) for i, p in enumerate(PROMPTS)]
    outputs = ours.generate(requests, steps_between=2)
    expected = [generate(theirs, prompt, params) for prompt in PROMPTS]
    assert [output.token_ids for output in outputs] == expected
    assert expected != [generate(theirs, prompt, None) for prompt in PROMPTS]
