"""Adapters under random operation: whatever shares a batch, makes way, is replaced or released, no token changes.

One name stands for two contents, the second of which replaces the first while requests of both run. All prompts begin
alike, so a page of other content that is found in the prefix cache becomes a wrong token. Outputs are those of
transformers with the adapter merged.
"""

import random
from collections.abc import Mapping
from pathlib import Path

import pytest

from tandem_engine.config import AdapterConfig, CacheConfig, EngineConfig, HostConfig, SchedulerConfig
from tandem_engine.engine import Engine
from tandem_engine.engine.loaded_model import load
from tandem_engine.engine.stats import Generation
from tandem_engine.messages.control import LoadAdapter, PauseMode, UnloadAdapter
from tandem_engine.messages.requests import AdapterRef, GenerateRequest
from tandem_engine.messages.sampling import SamplingParams
from tandem_lab.verify.reference import TransformersReference
from tandem_testing.adapters import ATTENTION, SEVEN, write_adapter
from tandem_testing.exactness import one_grammar_process
from tandem_testing.tiny_checkpoints import VOCAB_SIZE, write_tiny_checkpoint

FAMILIES = {"qwen3": SEVEN, "mixtral": ATTENTION}
FORMER, LATER, OTHER = "former", "later", "other"
NAMES = {FORMER: "sql", LATER: "sql", OTHER: "chat"}
"""What requests call each content."""

CHOICES = (None, FORMER, LATER, OTHER)
START = tuple(random.Random(7).choices(range(VOCAB_SIZE), k=20))
"""Of every prompt: more than a page."""

PROMPTS = (START, (*START, 5, 9), (*START, 5, 9, 12, 7), (*START[:12], 3, 8, 1))
REQUESTS, TOKENS = 24, 10
PAGE_SIZE, NUM_PAGES = 8, 15
"""Enough for two requests and a half: others are retracted."""

Answers = Mapping[tuple[str | None, int], tuple[int, ...]]


class World:
    """A tiny model, its adapters' folders, and what transformers says with each."""

    def __init__(self, family: str, folder: Path) -> None:
        self.model = write_tiny_checkpoint(family, folder / "model")
        self.folder = folder / "adapters"
        for seed, content in enumerate(NAMES, start=1):
            write_adapter(self.folder / content, self.model, seed=seed, modules=FAMILIES[family], strength=0.3)
        reference = TransformersReference(str(self.model))
        self.answers: Answers = {}
        for content in CHOICES:
            with reference.adapted(None if content is None else str(self.folder / content)):
                for number, prompt in enumerate(PROMPTS):
                    output = reference.generate(prompt, TOKENS, frozenset(), ignore_eos=True)
                    self.answers[content, number] = tuple(output.token_ids)
        assert len({self.answers[content, 0] for content in CHOICES}) == len(CHOICES), "an adapter changes no output"
        sources = AdapterConfig.of({content: self.folder / content for content in NAMES})
        names = load(self.config(sources), progress=False).adapters.names
        self.refs = {
            content: AdapterRef(name=NAMES[content], digest=ref.digest, source=content)
            for content, ref in names.items()
        }

    def config(self, adapters: AdapterConfig, *, overlap: bool = True, host: bool = False) -> EngineConfig:
        return EngineConfig(
            model_path=str(self.model),
            dtype="float32",
            threads=1,
            adapters=adapters,
            scheduler=SchedulerConfig(
                context_length=64,
                max_running_requests=4,
                chunked_prefill_size=8,
                enable_mixed_chunk=True,
                enable_overlap=overlap,
                max_retractions=1000,
                force_retract_every=7,
            ),
            cache=CacheConfig(
                page_size=PAGE_SIZE,
                num_pages=NUM_PAGES,
                host=HostConfig(enable_cache=True) if host else HostConfig(),
            ),
        )


@pytest.fixture(scope="module", params=FAMILIES)
def world(request, tmp_path_factory) -> World:
    return World(request.param, tmp_path_factory.mktemp("adapters"))


class Disturbance:
    """What is done to an engine between two of its turns."""

    def __init__(self, engine: Engine, dice: random.Random, rids: list[str]) -> None:
        self.engine, self.dice, self.rids = engine, dice, rids
        self.aborted: set[str] = set()
        self.done: set[str] = set()

    def __call__(self) -> None:
        if self.engine.scheduler.paused:
            self.engine.resume()
            return
        if self.dice.random() < 0.1:
            action = self.dice.choice((self.pause, self.abort, self.replace, self.unload, self.load_again))
            action()
            self.done.add(action.__name__)

    def pause(self) -> None:
        self.engine.pause(self.dice.choice((PauseMode.RETRACT, PauseMode.IN_PLACE)))

    def abort(self) -> None:
        if len(self.aborted) < 3:
            rid = self.dice.choice(self.rids)
            self.aborted.add(rid)
            self.engine.abort(rid)

    def replace(self) -> None:
        content = self.dice.choice((FORMER, LATER))
        self.engine.change_adapters(LoadAdapter(nonce=1, name="sql", path=content, replaces=True))

    def unload(self) -> None:
        self.engine.change_adapters(UnloadAdapter(nonce=1, name=self.dice.choice(("sql", "chat"))))

    def load_again(self) -> None:
        self.engine.change_adapters(LoadAdapter(nonce=1, name="chat", path=OTHER, replaces=True))


class FastClock:
    """A second passes with each reading, so turns end within a few steps."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        self._now += 1.0
        return self._now


def drawn(world: World, dice: random.Random) -> tuple[list[GenerateRequest], list[tuple[str | None, int]]]:
    """Requests, and which answer each has."""
    wanted = [(dice.choice(CHOICES), dice.randrange(len(PROMPTS))) for _ in range(REQUESTS)]
    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    requests = [
        GenerateRequest(
            rid=f"r{number}",
            input_ids=PROMPTS[prompt],
            sampling=sampling,
            adapter=None if content is None else world.refs[content],
        )
        for number, (content, prompt) in enumerate(wanted)
    ]
    return requests, wanted


def require_right(made: list[Generation], wanted: list[tuple[str | None, int]], world: World, aborted: set[str]) -> int:
    """How many have ended as they should; an aborted one has the beginning, and one that lost its adapter says so."""
    whole = 0
    for number, (generation, key) in enumerate(zip(made, wanted, strict=True)):
        expected, got = world.answers[key], tuple(generation.token_ids)
        assert got == expected[: len(got)], f"r{number} of {key}"
        if len(got) == len(expected):
            whole += 1
        else:
            assert f"r{number}" in aborted or generation.finish.code == "adapter_missing", f"r{number} of {key}"
    return whole


@pytest.mark.parametrize("seed", range(6))
def test_random_operation_changes_no_token(world: World, seed: int) -> None:
    dice = random.Random(seed)
    adapters = AdapterConfig(folder=str(world.folder), allow_updates=True, max_loaded=1 + seed % 3)
    config = world.config(adapters, overlap=seed % 2 == 0, host=seed >= 3)
    requests, wanted = drawn(world, dice)
    with one_grammar_process(), Engine.build(load(config, progress=False), config) as engine:
        engine._parts.shelf.clock = FastClock()
        disturbance = Disturbance(engine, dice, [each.rid for each in requests])
        made = engine.generate(requests, steps_between=2, before_turn=disturbance)
        assert require_right(made, wanted, world, disturbance.aborted) >= REQUESTS // 2
        assert {"pause", "replace"} <= disturbance.done, "too few disturbances: draw more"
        assert engine.scheduler.tally.retracted > 0
        assert engine.audit().problems == ()


def test_replaced_content_finds_no_page_of_the_former(world: World) -> None:
    """Equal prompts, one after the other, under one name: each content finds its own pages alone."""
    adapters = AdapterConfig(folder=str(world.folder), allow_updates=True, max_loaded=3)
    config = world.config(adapters)
    with one_grammar_process(), Engine.build(load(config, progress=False), config) as engine:
        cached = []
        for turn, content in enumerate((FORMER, LATER, FORMER, None, LATER)):
            ref = None if content is None else world.refs[content]
            sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
            request = GenerateRequest(rid=f"t{turn}", input_ids=START, sampling=sampling, adapter=ref)
            [made] = engine.generate([request])
            assert tuple(made.token_ids) == world.answers[content, 0]
            cached.append(made.cached_tokens)
    assert [bool(tokens) for tokens in cached] == [False, False, True, False, True]
