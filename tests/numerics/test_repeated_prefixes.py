"""The second prompt with a beginning continues within the first, and gets the tokens of an engine without a cache.

Whatever is given out has NaN until it is written, and slots of anchors are few, so provisional states make room all the
time: one that is read at a length that is not its own, or after another got its slot, becomes a wrong token.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem_engine.config import CacheConfig, DisaggConfig, EngineConfig, ModelImpl, SchedulerConfig
from tandem_engine.engine import Engine
from tandem_engine.engine.loaded_model import LoadedModel, load
from tandem_engine.engine.stats import Generation
from tandem_engine.messages.outputs import FinishReason
from tandem_engine.messages.requests import GenerateRequest
from tandem_engine.messages.sampling import SamplingParams
from tandem_testing.poisoned_states import poisoned_memory
from tandem_testing.tiny_checkpoints import write_tiny_checkpoint

SHARED = 430
"""Tokens, no multiple of anything."""
BEGINNING = tuple(number * number % 173 for number in range(SHARED))
PAGES = CacheConfig(num_pages=160)


def load_tiny(name: str, folder: Path, impl: ModelImpl) -> LoadedModel:
    torch.set_num_threads(1)
    path = write_tiny_checkpoint(name, folder)
    disagg = DisaggConfig(transport="none")
    return load(EngineConfig(model_path=str(path), dtype="float32", disagg=disagg, model_impl=impl), progress=False)


def limits(*, chunk: int = 2048, running: int = 8) -> SchedulerConfig:
    return SchedulerConfig(
        context_length=512,
        max_running_requests=running,
        audit_every_step=True,
        enable_overlap=False,
        chunked_prefill_size=chunk,
    )


def prompts(count: int) -> list[GenerateRequest]:
    return [
        GenerateRequest(
            rid=f"r{number}",
            input_ids=(*BEGINNING, *(1 + (number + 7) * step % 181 for step in range(70))),
            sampling=SamplingParams(max_tokens=4, ignore_eos=True),
        )
        for number in range(count)
    ]


def served(engine: Engine, requests: Sequence[GenerateRequest]) -> list[Generation]:
    """One after the other."""
    return checked(engine, [engine.generate([request])[0] for request in requests])


def checked(engine: Engine, found: list[Generation]) -> list[Generation]:
    assert engine.audit().problems == ()
    assert {each.finish.reason for each in found} == {FinishReason.LENGTH}, [each.finish for each in found]
    return found


def expected(model: LoadedModel, requests: Sequence[GenerateRequest]) -> list[list[int]]:
    config = replace(model.config, scheduler=limits(), cache=replace(PAGES, enable_prefix_cache=False))
    with Engine.build(model, config) as engine:
        return [each.token_ids for each in served(engine, requests)]


@pytest.mark.parametrize(
    ("name", "impl"),
    [("qwen3-next", ModelImpl.AUTO), ("qwen3.5", ModelImpl.AUTO), ("bamba", ModelImpl.AUTO)],
)
@pytest.mark.parametrize("chunk", [2048, 100])
def test_second_prompt_with_a_beginning_is_exact(name, impl, chunk, tmp_path):
    model, asked = load_tiny(name, tmp_path, impl), prompts(3)
    config = replace(model.config, scheduler=limits(chunk=chunk), cache=PAGES)
    with Engine.build(model, config) as engine, poisoned_memory(engine):
        found = served(engine, asked)
    assert [each.token_ids for each in found] == expected(model, asked)
    # Sixteenths of 500 tokens, and where the second leaves the first.
    assert [each.cached_tokens for each in found] == [0, 320, 384]


def test_model_that_computes_by_token_keeps_no_trials(tmp_path):
    model, asked = load_tiny("jamba", tmp_path, ModelImpl.AUTO), prompts(2)
    config = replace(model.config, scheduler=limits(), cache=PAGES)
    with Engine.build(model, config) as engine:
        found = served(engine, asked)
    assert [each.cached_tokens for each in found] == [0, 0]
    assert [each.token_ids for each in found] == expected(model, asked)


@pytest.mark.parametrize("together", [False, True])
def test_trials_that_make_room_change_no_token(together, tmp_path):
    """Beginnings of three kinds, more than there are slots for."""
    model = load_tiny("qwen3-next", tmp_path, ModelImpl.AUTO)
    asked = [
        GenerateRequest(
            rid=f"{request.rid}-{first}", input_ids=(first, *request.input_ids[first:]), sampling=request.sampling
        )
        for request in prompts(3)
        for first in (5, 3, 9)
    ]
    config = replace(model.config, scheduler=limits(chunk=150, running=3), cache=replace(PAGES, num_pages=140))
    with Engine.build(model, config) as engine, poisoned_memory(engine):
        found = checked(engine, engine.generate(asked)) if together else served(engine, asked)
        assert engine.memory.anchors is not None
        assert engine.memory.anchors.counts.replaced > 0
    assert [each.token_ids for each in found] == expected(model, asked)
    assert sum(each.cached_tokens for each in found) > 0
