"""An engine of two ranks does what an engine of one does. The ranks are threads, with gloo between them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from tandem_engine.config import CacheConfig, EngineConfig, SchedulerConfig
from tandem_engine.engine import Engine, LoadedModel, load
from tandem_engine.messages.outputs import FinishReason
from tandem_engine.model.base import CausalLM
from tandem_engine.verify.ranks import ThreadRanks
from tandem_testing.scheduler_builders import make_message
from tandem_testing.tiny_checkpoints import write_tiny_checkpoint

PROMPTS = [range(5, 25), range(40, 43), range(5, 60), range(70, 90)]
POISON = 250
"""A token that a faulty rank's model cannot stand."""


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> EngineConfig:
    checkpoint = write_tiny_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))
    return EngineConfig(
        model_path=str(checkpoint),
        dtype="float32",
        threads=2,
        cache=CacheConfig(num_pages=64),
        scheduler=SchedulerConfig(max_running_requests=8, chunked_prefill_size=32),
    )


@pytest.fixture(scope="module")
def alone(config) -> LoadedModel:
    return load(config, progress=False)


@pytest.fixture(scope="module")
def ranks(config) -> ThreadRanks:
    return ThreadRanks.load(config, 2)


def generate(engine: Engine, prompts=PROMPTS, **params) -> list[tuple[int, ...]]:
    messages = [make_message(f"r{i}", prompt, **params) for i, prompt in enumerate(prompts)]
    return [generation.token_ids for generation in engine.generate(messages, steps_between=2)]


@dataclass(frozen=True, slots=True)
class Sensitive:
    """A model that raises at `POISON`: before its first collective, or after its last."""

    model: CausalLM
    late: bool

    @property
    def config(self):
        return self.model.config

    @property
    def attention(self):
        return self.model.attention

    def forward(self, input_ids, positions, attend, wanted):
        poisoned = bool((input_ids == POISON).any())
        if poisoned and not self.late:
            raise ValueError("a token that this rank cannot stand")
        hidden = self.model.forward(input_ids, positions, attend, wanted)
        return hidden * torch.nan if poisoned else hidden

    def logits(self, hidden):
        logits = self.model.logits(hidden)
        if bool(hidden.isnan().any()):
            raise ValueError("a token that this rank cannot stand")
        return logits


def with_fault(ranks: ThreadRanks, *guilty: int, late: bool) -> ThreadRanks:
    parts = [
        replace(part, model=Sensitive(part.model, late)) if rank in guilty else part
        for rank, part in enumerate(ranks.parts)
    ]
    return ThreadRanks(parts=parts)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("guilty", [(0,), (1,), (0, 1)], ids=["rank 0", "rank 1", "both"])
def test_a_request_that_breaks_a_step_ends_alone_and_the_ranks_go_on(config, alone, ranks, guilty, late, overlap):
    config = replace(config, scheduler=replace(config.scheduler, enable_overlap=overlap))
    with Engine.build(alone, replace(alone.config, scheduler=config.scheduler)) as engine:
        expected = generate(engine)
    messages = [make_message(f"r{i}", prompt) for i, prompt in enumerate(PROMPTS)]
    messages.insert(2, make_message("poison", [3, POISON, 4]))
    with with_fault(ranks, *guilty, late=late).engine(config) as engine:
        generations = engine.generate(messages, steps_between=2)
        poison = generations.pop(2)
        assert [generation.token_ids for generation in generations] == expected
        assert (poison.finish.reason, poison.finish.retryable) == (FinishReason.ERROR, False)
        assert poison.token_ids == ()
        assert engine.scheduler.stats().convicted_total == 1
        assert generate(engine) == expected
        assert engine.audit().problems == ()
