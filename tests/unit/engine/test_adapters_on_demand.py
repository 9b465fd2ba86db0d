"""Adapters that requests bring into the memory of an engine: equal tokens, whatever has to make way for what."""

import itertools
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem_engine.base.errors import BusyError
from tandem_engine.config import AdapterConfig, EngineConfig, SchedulerConfig
from tandem_engine.engine import Engine
from tandem_engine.engine.adapter_shelf import REFUSED_S
from tandem_engine.engine.loaded_model import LoadedModel, load
from tandem_engine.engine.stats import Generation
from tandem_engine.messages.control import LoadAdapter, PauseMode, ServedAdapter, UnloadAdapter
from tandem_engine.messages.requests import AdapterRef, GenerateRequest
from tandem_engine.messages.sampling import SamplingParams
from tandem_testing.adapters import write_adapter
from tandem_testing.exactness import one_grammar_process
from tandem_testing.tiny_checkpoints import write_tiny_checkpoint

NAMES = ("one", "two", "three")
PROMPTS = ((5, 9, 12, 7), (3, 8, 8, 1, 30, 2))
LIMIT_S = 60.0
MAX_STEPS = 1_000_000


class FastClock:
    """A second passes with each reading, so turns end within a few steps."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        self._now += 1.0
        return self._now


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("on-demand")
    checkpoint = write_tiny_checkpoint("qwen3", folder / "model")
    for seed, name in enumerate(NAMES, start=1):
        write_adapter(folder / "adapters" / name, checkpoint, seed=seed)
    return folder


@pytest.fixture(scope="module")
def all_loaded(folder: Path) -> LoadedModel:
    """With all adapters in memory."""
    return loaded(folder, AdapterConfig.of({name: folder / "adapters" / name for name in NAMES}))


def loaded(folder: Path, adapters: AdapterConfig) -> LoadedModel:
    return load(config_of(folder, adapters), progress=False)


def config_of(folder: Path, adapters: AdapterConfig) -> EngineConfig:
    return EngineConfig(
        model_path=str(folder / "model"),
        dtype="float32",
        threads=1,
        adapters=adapters,
        scheduler=SchedulerConfig(context_length=128, max_running_requests=8),
    )


@pytest.fixture(scope="module")
def refs(all_loaded: LoadedModel) -> dict[str, AdapterRef]:
    """As the gateway sends them for registered adapters."""
    return {
        name: AdapterRef(name=name, digest=ref.digest, source=name) for name, ref in all_loaded.adapters.names.items()
    }


def request(number: int, ref: AdapterRef | None, *, tokens: int = 6) -> GenerateRequest:
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    prompt = PROMPTS[number % len(PROMPTS)]
    return GenerateRequest(rid=f"r{number}", input_ids=prompt, sampling=sampling, adapter=ref)


def expected(folder: Path, model: LoadedModel, requests: list[GenerateRequest]) -> list[tuple[int, ...]]:
    with Engine.build(model, config_of(folder, model.config.adapters)) as engine:
        return outputs(engine.generate(requests))


def outputs(generations: list[Generation]) -> list[tuple[int, ...]]:
    return [tuple(each.token_ids) for each in generations]


def on_demand(folder: Path, *, limit: int, turn_s: float = 2.0) -> AdapterConfig:
    return AdapterConfig(folder=str(folder / "adapters"), allow_updates=True, max_loaded=limit, turn_s=turn_s)


@pytest.fixture
def engine(folder: Path, request) -> Iterator[Engine]:
    limit = getattr(request, "param", 1)
    with (
        one_grammar_process(),
        Engine.build(
            loaded(folder, on_demand(folder, limit=limit)), config_of(folder, on_demand(folder, limit=limit))
        ) as engine,
    ):
        yield engine


@pytest.mark.parametrize("engine", [1, 2], indirect=True)
def test_interleaved_adapters_answer_as_if_all_were_loaded(engine, folder, all_loaded, refs):
    choices = [refs["one"], None, refs["two"], refs["three"], refs["one"], refs["two"], None, refs["three"]]
    requests = [request(number, ref) for number, ref in enumerate(choices)]
    assert outputs(engine.generate(requests)) == expected(folder, all_loaded, requests)
    shelf = engine._parts.shelf
    assert (shelf.loads_total >= 3, shelf.evictions_total >= 1, shelf.failures_total) == (True, True, 0)
    assert len(engine.adapter_memory.resident) <= shelf.table.limit
    assert engine.audit().problems == ()


def test_endless_outputs_leave_a_turn_to_others(engine, folder, all_loaded, refs):
    engine._parts.shelf.clock = FastClock()
    requests = [
        request(0, refs["one"], tokens=100),
        request(1, refs["two"], tokens=8),
        request(2, refs["three"], tokens=8),
    ]
    ended: list[str] = []

    def note() -> None:
        live = {req.rid for req in engine.scheduler.queues.live()}
        retractions.update(req.retractions for req in engine.scheduler.queues.live())
        ended.extend(rid for rid in ("r0", "r1", "r2") if rid in begun and rid not in live and rid not in ended)
        begun.update(live)

    begun: set[str] = set()
    retractions: set[int] = set()
    made = outputs(engine.generate(requests, before_turn=note))
    assert made == expected(folder, all_loaded, requests)
    assert ended[:2] == ["r1", "r2"]  # neither waited for the end of the first
    assert engine.scheduler.tally.retracted >= 1
    assert retractions == {0}  # of which a request may have only so many


def test_changed_folder_is_refused_until_registered(engine, refs, caplog):
    stale = AdapterRef(name="one", digest=refs["one"].digest, source="two")
    [answer] = engine.generate([request(0, stale)])
    assert (answer.finish.code, answer.finish.retryable) == ("adapter_missing", True)
    assert f"digest {refs['two'].digest.hex()}, and not {refs['one'].digest.hex()}" in answer.finish.error
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [answer.finish.error]
    assert engine.adapter_memory.refused == (refs["one"].digest.hex(),)
    failures = engine._parts.shelf.failures_total
    [again] = engine.generate([request(1, stale)])
    assert (again.finish.code, engine._parts.shelf.failures_total) == ("adapter_missing", failures)


def test_failed_load_is_reported_until_it_succeeds(engine, refs):
    shelf = engine._parts.shelf
    clock = FastClock()
    shelf.clock = clock
    before = engine.adapter_changes
    [answer] = engine.generate([request(0, AdapterRef(name="one", digest=refs["one"].digest, source="two"))])
    [failed] = engine.adapter_memory.failed
    assert (failed.name, failed.digest) == ("one", refs["one"].digest.hex())
    assert failed.reason == answer.finish.error
    assert engine.adapter_changes != before
    clock._now += REFUSED_S
    engine.generate([request(1, refs["one"])])
    assert engine.adapter_memory.failed == ()


def test_refused_content_is_tried_again_later(engine, refs):
    shelf = engine._parts.shelf
    clock = itertools.count(0.0, REFUSED_S)
    shelf.clock = type("Clock", (), {"now": lambda _: next(clock)})()
    engine.generate([request(0, AdapterRef(name="one", digest=refs["one"].digest, source="two"))])
    [answer] = engine.generate([request(1, refs["one"])])
    assert answer.finish.code is None


def test_source_outside_of_the_folder_is_refused(engine, refs):
    outside = AdapterRef(name="one", digest=refs["one"].digest, source="../adapters/one/../../model")
    [answer] = engine.generate([request(0, outside)])
    assert answer.finish.code == "adapter_missing"
    assert "outside --lora-dir" in answer.finish.error


def test_sources_of_requests_need_a_folder_and_permission(folder, refs):
    for config in (AdapterConfig(allow_updates=True), AdapterConfig(folder=str(folder / "adapters"))):
        with Engine.build(loaded(folder, config), config_of(folder, config)) as engine:
            [answer] = engine.generate([request(0, refs["one"])])
            assert (answer.finish.code, engine.adapter_memory.loads) == ("adapter_missing", False)


def test_command_makes_idle_adapters_leave_but_not_pinned_ones(engine, refs):
    engine.generate([request(0, refs["one"])])

    def command(name: str, *, pinned: bool = False) -> None:
        change(engine, LoadAdapter(nonce=1, name=name, path=name, replaces=False, pinned=pinned))
        engine.step()

    command("two")
    assert engine.adapter_memory.resident == (refs["two"].digest.hex(),)
    with pytest.raises(BusyError, match="0 adapters are pinned, --max-cpu-loras is 1: leave one"):
        command("three", pinned=True)


def test_unload_keeps_late_requests_from_loading_it(engine, refs):
    engine.generate([request(0, refs["one"])])
    digest = refs["one"].digest.hex()
    assert change(engine, UnloadAdapter(nonce=1, name="one", cached=digest)).digest == digest
    engine.step()
    assert (engine.adapter_memory.resident, engine.adapter_memory.refused) == ((), (digest,))
    [answer] = engine.generate([request(1, refs["one"])])
    assert answer.finish.code == "adapter_missing"
    change(engine, LoadAdapter(nonce=1, name="one", path="one", replaces=False))
    [answer] = engine.generate([request(2, refs["one"])])
    assert answer.finish.code is None


def leaving_for_another(engine, refs):
    """The shelf of `engine`, whose adapter "one" r0 computes with, and leaves its place to that of r1."""
    shelf = engine._parts.shelf
    shelf.clock = FastClock()
    engine.add(request(0, refs["one"], tokens=100))
    step_until(engine, lambda: shelf.table.resident)
    engine.add(request(1, refs["two"]))
    step_until(engine, lambda: shelf.table.leaving)
    return shelf


def test_adapter_stays_when_the_one_that_waited_has_gone(engine, refs):
    """Its later requests do not wait for the end of those that run."""
    shelf = leaving_for_another(engine, refs)
    engine.abort("r1")
    step_until(engine, lambda: engine.scheduler.waiting_for_adapter == 0)
    engine.add(request(2, refs["one"], tokens=2))
    step_until(engine, lambda: "r2" not in {req.rid for req in engine.scheduler.queues.live()})
    assert "r0" in {req.rid for req in engine.scheduler.queues.live()}
    assert (shelf.loads_total, shelf.table.leaving) == (1, set())
    engine.abort_all()
    step_until(engine, lambda: engine.idle)


def test_retracted_request_keeps_adapter_being_unloaded(engine, folder, all_loaded, refs):
    """It does not wait for its adapter, so it may be computed at any step."""
    shelf = engine._parts.shelf
    shelf.clock = FastClock()
    requests = [request(0, refs["one"], tokens=20), request(1, refs["two"])]
    turns = itertools.count()

    def pause_and_resume() -> None:
        if not shelf.table.leaving and not engine.scheduler.paused:
            return
        match next(turns):
            case 0:
                engine.pause(PauseMode.RETRACT)
            case 3:
                assert shelf.table.slots.keys() == {refs["one"].digest}
                engine.resume()

    made = outputs(engine.generate(requests, before_turn=pause_and_resume))
    assert made == expected(folder, all_loaded, requests)
    assert next(turns) > 3


def test_unload_serves_those_that_wait_for_it_already(engine, refs):
    shelf = leaving_for_another(engine, refs)
    engine.add(request(2, refs["one"]))
    step_until(engine, lambda: engine.scheduler.waiting_for_adapter == 2)
    change(engine, UnloadAdapter(nonce=1, name="one", cached=refs["one"].digest.hex()))
    step_until(engine, lambda: engine.idle)
    assert (shelf.failures_total, shelf.table.slots.keys()) == (0, {refs["two"].digest})


def test_unloaded_adapter_is_kept_nowhere(engine):
    change(engine, LoadAdapter(nonce=1, name="two", path="two", replaces=False))
    [weights] = map(weakref.ref, engine._parts.shelf.table.weights)
    change(engine, UnloadAdapter(nonce=1, name="two"))
    step_until(engine, lambda: weights() is None)


def change(engine: Engine, order: LoadAdapter | UnloadAdapter) -> ServedAdapter:
    changed = engine.change_adapters(order)
    step_until(engine, changed.done)
    return changed.result().adapter


def step_until(engine: Engine, reached) -> None:
    for _ in range(MAX_STEPS):
        if reached():
            return
        engine.step()
    raise AssertionError(f"not reached: {engine.stats()}")


def test_abandoned_wait_ends_its_load(engine, refs):
    engine.add(request(0, refs["one"]))
    engine.abort_all()
    while not engine.idle:
        engine.step()
    engine.step()
    assert (engine.scheduler.waiting_for_adapter, engine._parts.shelf._wanted) == (0, {})
