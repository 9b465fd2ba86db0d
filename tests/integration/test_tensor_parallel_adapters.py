"""Adapters that change while an engine of several ranks serves: the same on all ranks, in the same turn."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import msgspec
import pytest

from tandem_engine.base.errors import BusyError, CheckpointError, ConfigError
from tandem_engine.config import AdapterConfig, CacheConfig, EngineConfig, SchedulerConfig
from tandem_engine.engine import Engine
from tandem_engine.engine.adapter_loads import AdapterLoads
from tandem_engine.engine.loaded_model import load
from tandem_engine.messages.control import LoadAdapter, ServedAdapter, UnloadAdapter
from tandem_engine.messages.requests import AdapterRef, GenerateRequest
from tandem_engine.messages.sampling import SamplingParams
from tandem_lab.verify.engines import ThreadRanks
from tandem_testing.adapters import write_adapter
from tandem_testing.tiny_checkpoints import write_tiny_checkpoint

NAMES = ("one", "two", "three", "four")
MAX_STEPS = 1_000_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    checkpoint = write_tiny_checkpoint("qwen3", folder / "model")
    for seed, name in enumerate(NAMES, start=1):
        write_adapter(folder / "adapters" / name, checkpoint, seed=seed)
    return folder


def config_of(folder: Path, adapters: AdapterConfig) -> EngineConfig:
    return EngineConfig(
        model_path=str(folder / "model"),
        dtype="float32",
        threads=2,
        adapters=adapters,
        cache=CacheConfig(num_pages=64),
        scheduler=SchedulerConfig(context_length=128, max_running_requests=8, chunked_prefill_size=32),
    )


@pytest.fixture(scope="module")
def refs(folder) -> dict[str, AdapterRef]:
    adapters = AdapterConfig.of({name: folder / "adapters" / name for name in NAMES})
    loaded = load(config_of(folder, adapters), progress=False)
    return {name: AdapterRef(name=name, digest=ref.digest, source=name) for name, ref in loaded.adapters.names.items()}


def on_demand(folder: Path, *, limit: int, turn_s: float = 0.001) -> EngineConfig:
    adapters = AdapterConfig(folder=str(folder / "adapters"), allow_updates=True, max_loaded=limit, turn_s=turn_s)
    return config_of(folder, adapters)


def workload(refs: dict[str, AdapterRef], count: int, *, seed: int = 0) -> list[GenerateRequest]:
    chance = Random(seed)
    return [
        GenerateRequest(
            rid=f"r{number}",
            input_ids=tuple(chance.choices(range(3, 90), k=chance.randint(2, 50))),
            sampling=SamplingParams(temperature=0.0, max_tokens=chance.randint(1, 12), ignore_eos=True),
            adapter=refs.get(chance.choice([*NAMES, "base"])),
        )
        for number in range(count)
    ]


def outputs(engine: Engine, requests: list[GenerateRequest]) -> list[tuple[int, ...]]:
    return [tuple(each.token_ids) for each in engine.generate(requests, steps_between=2)]


@pytest.fixture(scope="module")
def expected(folder, refs) -> Callable[[list[GenerateRequest]], list[tuple[int, ...]]]:
    """By one rank with all adapters in memory."""
    config = config_of(folder, AdapterConfig.of({name: folder / "adapters" / name for name in NAMES}))
    loaded = load(config, progress=False)

    def compute(requests: list[GenerateRequest]) -> list[tuple[int, ...]]:
        with Engine.build(loaded, config) as engine:
            return outputs(engine, requests)

    return compute


@pytest.mark.parametrize("limit", [1, 2, 4])
def test_ranks_load_adapters_on_demand_with_equal_output(folder, refs, expected, limit):
    config = on_demand(folder, limit=limit)
    requests = workload(refs, 24, seed=limit)
    with ThreadRanks.load(config, 2).engine(config) as engine:
        assert outputs(engine, requests) == expected(requests)
        assert engine.stats().adapter_loads_total >= limit
        assert engine.audit().problems == ()


def test_request_check_on_rank_0_keeps_ranks_equal(folder, refs, expected):
    """A check looks an adapter up, which must not make it the last to leave on this rank alone."""
    config = on_demand(folder, limit=2)
    requests = workload(refs, 24, seed=9)
    probes = [request for request in workload(refs, 24, seed=10) if request.adapter is not None]
    with ThreadRanks.load(config, 2).engine(config) as engine:
        chance = Random(3)
        made = engine.generate(requests, steps_between=2, before_turn=lambda: engine.check(chance.choice(probes)))
        assert [tuple(each.token_ids) for each in made] == expected(requests)


def test_orders_change_the_adapters_of_all_ranks(folder, refs, expected):
    config = on_demand(folder, limit=4)
    requests = [request for request in workload(refs, 12) if request.adapter is refs["one"]]
    named = [
        msgspec.structs.replace(each, adapter=msgspec.structs.replace(each.adapter, source="")) for each in requests
    ]
    with ThreadRanks.load(config, 2).engine(config) as engine:
        served = change(engine, LoadAdapter(nonce=1, name="one", path="one", replaces=False))
        assert bytes.fromhex(served.digest) == refs["one"].digest
        assert outputs(engine, named) == expected(requests)
        with pytest.raises(ConfigError, match="is loaded already"):
            change(engine, LoadAdapter(nonce=2, name="one", path="two", replaces=False))
        change(engine, UnloadAdapter(nonce=3, name="one"))
        [refused] = engine.generate(named[:1])
        assert refused.finish.code == "adapter_missing"


def test_load_that_fails_on_one_rank_changes_nothing_on_any(folder, refs, expected, monkeypatch):
    config = on_demand(folder, limit=4)
    load_part = AdapterLoads._load

    def fail_on_rank_1(self, source):
        if self.group.rank == 1 and source.path == "two":
            raise CheckpointError("adapter 'two': bytes are missing")
        return load_part(self, source)

    monkeypatch.setattr(AdapterLoads, "_load", fail_on_rank_1)
    with ThreadRanks.load(config, 2).engine(config) as engine:
        with pytest.raises(CheckpointError, match="'two' cannot be loaded on another rank"):
            change(engine, LoadAdapter(nonce=1, name="two", path="two", replaces=False))
        [refused] = engine.generate([request_of(refs["two"])])
        assert (refused.finish.code, refused.finish.retryable) == ("adapter_missing", True)
        requests = [each for each in workload(refs, 16) if each.adapter is not refs["two"]]
        assert outputs(engine, requests) == expected(requests)


def test_file_system_that_hangs_on_one_rank_is_busy_on_all(folder, monkeypatch):
    """So the order is worth another attempt, whichever rank answers it."""
    config = on_demand(folder, limit=4)
    load_part = AdapterLoads._load

    def hang_on_rank_1(self, source):
        if self.group.rank == 1:
            raise BusyError("adapter 'two' cannot be loaded: its file system has not answered for 30 s")
        return load_part(self, source)

    monkeypatch.setattr(AdapterLoads, "_load", hang_on_rank_1)
    with (
        ThreadRanks.load(config, 2).engine(config) as engine,
        pytest.raises(BusyError, match="'two' cannot be loaded on another rank"),
    ):
        change(engine, LoadAdapter(nonce=1, name="two", path="two", replaces=False))


def test_files_that_differ_between_ranks_are_refused(folder, monkeypatch):
    """The folder is replaced between the reads of two ranks."""
    config = on_demand(folder, limit=4)
    load_part = AdapterLoads._load

    def other_on_rank_1(self, source):
        return load_part(self, replace(source, path="three") if self.group.rank == 1 else source)

    monkeypatch.setattr(AdapterLoads, "_load", other_on_rank_1)
    with (
        ThreadRanks.load(config, 2).engine(config) as engine,
        pytest.raises(CheckpointError, match="'two': its files changed while they were read"),
    ):
        change(engine, LoadAdapter(nonce=1, name="two", path="two", replaces=False))


def request_of(ref: AdapterRef) -> GenerateRequest:
    sampling = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    return GenerateRequest(rid="one more", input_ids=(5, 9, 12), sampling=sampling, adapter=ref)


def change(engine: Engine, order: LoadAdapter | UnloadAdapter) -> ServedAdapter:
    changed = engine.change_adapters(order)
    for _ in range(MAX_STEPS):
        if changed.done():
            return changed.result().adapter
        engine.step()
    raise AssertionError(f"{order} is not answered")
