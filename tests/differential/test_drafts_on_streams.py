"""Speculative decoding on a simulated device: tokens as without drafts, drafts of a CPU, and no wait for a proposal."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tandem_engine.config import (
    CacheConfig,
    DisaggConfig,
    EngineConfig,
    GraphConfig,
    SchedulerConfig,
    SpecAlgorithm,
    SpecConfig,
)
from tandem_engine.engine import Engine, assembly
from tandem_engine.engine.loaded_model import LoadedModel
from tandem_engine.executor.cuda.runner import StreamRunner
from tandem_engine.executor.cuda.streams import StreamFuture
from tandem_engine.executor.memory_profile import Footprint, plan_pool
from tandem_engine.executor.platform import Platform, RunnerParts
from tandem_engine.memory.sizing import MIN_POOL, MemoryPlan
from tandem_engine.messages.grammar import GrammarKind, GrammarSpec
from tandem_engine.messages.requests import GenerateRequest
from tandem_engine.messages.sampling import SamplingParams
from tandem_engine.parallel.group import Parallel
from tandem_engine.speculative.interface import DraftRequest, DraftTokens, Proposer
from tandem_testing.simulated_platform import SimulatedPlatform, load_simulated
from tandem_testing.tiny_checkpoints import VOCAB_SIZE, write_tiny_checkpoint, write_tiny_eagle3, write_tiny_head

GRAPHS = GraphConfig(sizes=(4, 8))
NONE = SpecConfig()
DIGITS = GrammarSpec(kind=GrammarKind.REGEX, source="[0-9 ]{40}")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> LoadedModel:
    checkpoint = write_tiny_checkpoint("qwen3", tmp_path_factory.mktemp("models") / "model")
    write_tiny_head(checkpoint, Path(f"{checkpoint}-eagle"))
    return load_simulated(checkpoint)


def spec_of(model: LoadedModel, algorithm: SpecAlgorithm) -> SpecConfig:
    suffix = {SpecAlgorithm.NGRAM: None, SpecAlgorithm.DRAFT: "", SpecAlgorithm.EAGLE: "-eagle"}[algorithm]
    path = "" if suffix is None else f"{model.config.model_path}{suffix}"
    return SpecConfig(
        algorithm=algorithm, draft_model_path=path, prompt_lookup_min=1, num_draft_tokens=3, adaptive=False
    )


def engine_of(model: LoadedModel, spec: SpecConfig, platform: Platform | None, **scheduler: object) -> Engine:
    config = replace(
        model.config,
        speculative=spec,
        cache=CacheConfig(page_size=8, num_pages=160),
        scheduler=SchedulerConfig(context_length=300, max_running_requests=4, **scheduler),
        disagg=DisaggConfig(transport="none"),
        graphs=GRAPHS,
    )
    return Engine.build(model, config, platform=platform)


def request(rid: str, prompt: Sequence[int], **sampling: object) -> GenerateRequest:
    params = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, **sampling}
    return GenerateRequest(rid=rid, input_ids=tuple(prompt), sampling=SamplingParams(**params))


def workload() -> list[GenerateRequest]:
    """Greedy, with seeds and every filter, and with penalties; repetitive and not; sharing prefixes."""
    shared = [7, 8, 9, 10, 11] * 4
    return [
        request("greedy", shared),
        request("hot", [*shared, 1], temperature=1.0, seed=1),
        request("filtered", range(3, 20), temperature=0.9, top_k=40, top_p=0.9, min_p=0.01, seed=2),
        # Whatever it samples has occurred before, so that there is something to look up.
        request("everything", range(VOCAB_SIZE - 3), temperature=0.7, top_k=4, seed=4),
        request("penalised", [*shared, 2], temperature=0.8, seed=3, frequency_penalty=0.7, presence_penalty=0.2),
    ]


def tokens_of(engine: Engine) -> list[tuple[int, ...]]:
    return [generation.token_ids for generation in engine.generate(workload(), steps_between=2)]


@pytest.fixture(scope="module")
def without_drafts(model) -> list[tuple[int, ...]]:
    with engine_of(model, NONE, SimulatedPlatform()) as engine:
        return tokens_of(engine)


@pytest.mark.parametrize("algorithm", SpecAlgorithm)
def test_tokens_are_those_of_no_drafts_greedy_or_seeded(model, without_drafts, algorithm):
    platform = SimulatedPlatform()
    with engine_of(model, spec_of(model, algorithm), platform) as engine:
        assert tokens_of(engine) == without_drafts
        assert engine.stats().speculation.drafted_total > 0
    assert platform.replays > 0


def test_head_of_three_layers_drafts_on_a_device(model, without_drafts, tmp_path):
    """Graphs multiply the features of their layers too: guesses are those of a CPU."""
    head = write_tiny_eagle3(Path(model.config.model_path), tmp_path / "head")
    spec = replace(spec_of(model, SpecAlgorithm.EAGLE), draft_model_path=str(head))
    received = []
    for platform in (SimulatedPlatform(), None):
        with engine_of(model, spec, platform, enable_overlap=False) as engine:
            received.append(listen(engine))
            assert tokens_of(engine) == without_drafts
        assert platform is None or platform.replays > 0
    on_device, on_cpu = received
    assert len(on_device) > 10
    assert on_device == on_cpu


def listen(engine: Engine) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Every text that was drafted for, and what was proposed, from now on."""
    received = []
    speculation = engine.scheduler._shared.speculation

    class Listening:
        def __init__(self, proposer: Proposer) -> None:
            self._proposer = proposer

        def __getattr__(self, name: str) -> object:
            return getattr(self._proposer, name)

        def propose(self, requests: Sequence[DraftRequest]) -> DraftTokens:
            texts = [tuple(one.token_ids(0, one.seq_len)) for one in requests]
            drafts = self._proposer.propose(requests)
            chains = drafts.chains if drafts.guesses is None else drafts.guesses.chains(drafts.chains)
            received.extend((text, chain) for text, chain in zip(texts, chains, strict=True) if chain)
            return drafts

    speculation.proposer = Listening(speculation.proposer)
    return received


def test_draft_head_drafts_equal_on_device_and_cpu(model):
    """So it reads the states of its own text, and continues from its own: drafts change with either."""
    received = []
    for platform in (SimulatedPlatform(), None):
        with engine_of(model, spec_of(model, SpecAlgorithm.EAGLE), platform, enable_overlap=False) as engine:
            received.append(listen(engine))
            tokens_of(engine)
    on_device, on_cpu = received
    assert len(on_device) > 10
    assert on_device == on_cpu


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("algorithm", [SpecAlgorithm.DRAFT, SpecAlgorithm.EAGLE])
def test_proposal_and_its_verify_step_are_queued_without_sync(model, algorithm, overlap, monkeypatch):
    calls: list[str] = []
    queue, arrived, guess = StreamRunner._queue, StreamFuture._arrived, StreamRunner.guess

    def queued(runner, batch):
        calls.append("verify" if batch.draft_lens else "guess")
        return queue(runner, batch)

    def looked(future):
        calls.append("look")
        return arrived(future)

    def proposed(runner, batches):
        calls.append("propose")
        return guess(runner, batches)

    monkeypatch.setattr(StreamRunner, "_queue", queued)
    monkeypatch.setattr(StreamFuture, "_arrived", looked)
    monkeypatch.setattr(StreamRunner, "guess", proposed)
    sampling = {"temperature": 0.9, "seed": 5}
    with engine_of(model, spec_of(model, algorithm), SimulatedPlatform(), enable_overlap=overlap) as engine:
        engine.generate([request("one", range(3, 20), **sampling)])
    proposals = [index for index, call in enumerate(calls) if call == "propose"]
    assert len(proposals) > 2
    for proposal in proposals:
        behind = calls[proposal + 1 : calls.index("look", proposal)]
        # Towards its end a request has room for fewer.
        assert behind in [[*["guess"] * count, "verify"] for count in (1, 2, 3)]


@pytest.mark.parametrize("algorithm", [SpecAlgorithm.DRAFT, SpecAlgorithm.EAGLE])
def test_drafts_on_streams_with_grammar_equal_no_drafts(model, algorithm):
    """Its masks need the drafts of its run: they wait for these, and the step for the masks."""
    asked = [
        request("plain", [7, 8, 9, 10, 11] * 3),
        request("grammar", [1, 2, 3], grammar=DIGITS, ignore_eos=False),
    ]
    with engine_of(model, NONE, SimulatedPlatform()) as engine:
        expected = [generation.token_ids for generation in engine.generate(asked)]
    with engine_of(model, spec_of(model, algorithm), SimulatedPlatform()) as engine:
        assert [generation.token_ids for generation in engine.generate(asked)] == expected
        assert engine.stats().speculation.drafted_total > 0


class Weighed(SimulatedPlatform):
    """Graphs of a model take as many bytes as it has layers, times a thousand."""

    def __init__(self) -> None:
        super().__init__()
        self.weighed: list[RunnerParts] = []

    def graph_bytes(self, make: Callable[[], RunnerParts]) -> int:
        assert super().graph_bytes(make) >= 0, "it is captured"
        self.weighed.append(make())
        return 1000 * len(self.weighed[-1].model.attention)


@pytest.mark.parametrize(
    ("algorithm", "layers"), [(SpecAlgorithm.NGRAM, [3]), (SpecAlgorithm.DRAFT, [3, 3]), (SpecAlgorithm.EAGLE, [3, 1])]
)
def test_memory_plan_includes_graphs_of_draft_model(model, algorithm, layers, monkeypatch):
    measured = []

    def plan(config: EngineConfig, footprint: Footprint, parallel: Parallel) -> MemoryPlan:
        measured.append(footprint.graph_bytes())
        return plan_pool(config, footprint, parallel)

    monkeypatch.setattr(assembly, "plan_pool", plan)
    platform = Weighed()
    with engine_of(model, spec_of(model, algorithm), platform):
        assert [len(parts.model.attention) for parts in platform.weighed] == layers
        assert measured == [1000 * sum(layers)]
        assert all(parts.pool.num_pages == MIN_POOL for parts in platform.weighed)


def test_draft_model_catches_up_and_guesses_by_graphs(model):
    """It is always right here, so each proposal begins with two tokens; the prompt alone is queued step by step."""
    platform = SimulatedPlatform()
    with engine_of(model, spec_of(model, SpecAlgorithm.DRAFT), platform, enable_overlap=False) as engine:
        engine.generate([request("one", range(3, 20), max_tokens=24)])
        stats = engine.stats().speculation
    assert stats.accepted_total == stats.drafted_total > 12
    _, drafting = platform.backends
    assert drafting.planned == 1
