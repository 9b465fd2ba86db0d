"""Tokens are those of transformers whichever step is the first to use the kernel of small steps."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from tandem_engine.config import CacheConfig, EngineConfig, SchedulerConfig
from tandem_engine.engine import Engine
from tandem_engine.engine.loaded_model import LoadedModel, load
from tandem_engine.messages.requests import GenerateRequest
from tandem_engine.messages.sampling import SamplingParams
from tandem_engine.model.cpu.step import SmallStep
from tandem_engine.model.decoder import Decoder
from tandem_testing.tiny_checkpoints import write_tiny_checkpoint

PROMPTS = [tuple(range(3, 20)), tuple(range(100, 140)), (5, 6, 7)]
TOKENS = 10


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@dataclass(kw_only=True)
class Arriving:
    """The kernel of a model, which is there from look number `first` on, counted from 0."""

    kernel: Any
    first: int
    looks: int = 0

    def get(self) -> Any:
        self.looks += 1
        return self.kernel if self.looks > self.first else None


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    return str(write_tiny_checkpoint("qwen3", tmp_path_factory.mktemp("late")))


@pytest.fixture(scope="module")
def loaded(checkpoint) -> LoadedModel:
    return load(EngineConfig(model_path=checkpoint, dtype="float32"), progress=False)


@pytest.fixture(scope="module")
def reference(checkpoint) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    tokens = []
    for prompt in PROMPTS:
        ids = [*prompt]
        for _ in range(TOKENS):
            with torch.inference_mode():
                ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        tokens.append(ids[len(prompt) :])
    return tokens


@pytest.mark.parametrize("first", range(9))
def test_tokens_are_the_same_from_whichever_step_on(loaded, reference, monkeypatch, first):
    assert isinstance(loaded.model, Decoder)
    assert loaded.model.fused is not None
    small = []
    forward = SmallStep.forward
    monkeypatch.setattr(SmallStep, "forward", lambda step, *given: small.append(step) or forward(step, *given))
    kernel = Arriving(kernel=loaded.model.fused.kernel.get(), first=first)
    late = replace(loaded, model=replace(loaded.model, fused=replace(loaded.model.fused, kernel=kernel)))
    config = replace(
        loaded.config,
        cache=CacheConfig(page_size=16, num_pages=100),
        scheduler=SchedulerConfig(context_length=200, audit_every_step=True),
    )
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    requests = [
        GenerateRequest(rid=f"{number}", input_ids=prompt, sampling=sampling) for number, prompt in enumerate(PROMPTS)
    ]
    with Engine.build(late, config) as engine:
        outputs = engine.generate(requests)
    assert [list(output.token_ids) for output in outputs] == reference
    assert len(small) == kernel.looks - first > 0
