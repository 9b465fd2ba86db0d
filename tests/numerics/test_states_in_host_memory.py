"""Models with states over device, host memory and files: a prefix that comes back is continued as on the device.

Device and host memory are short, so that blocks and states leave and return all the time. Whatever is given out has NaN
until it is written, so a state that is read too early, late, or from elsewhere becomes a wrong token.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tandem_engine.config import CacheConfig, DisaggConfig, EngineConfig, HostConfig, SchedulerConfig, WritePolicy
from tandem_engine.engine import Engine
from tandem_engine.engine.loaded_model import LoadedModel, load
from tandem_engine.memory.page_copies import CopyKind
from tandem_engine.messages.requests import GenerateRequest
from tandem_engine.messages.sampling import SamplingParams
from tandem_testing.poisoned_states import poisoned_memory
from tandem_testing.tiny_checkpoints import write_tiny_checkpoint

PLAIN = SchedulerConfig(
    context_length=400, max_running_requests=2, audit_every_step=True, enable_overlap=False, chunked_prefill_size=96
)
SHORT = CacheConfig(num_pages=24)
"""Pages for a request and a half."""
SHARED = tuple(range(130))
PROMPTS = tuple((*SHARED, *range(first, first + 40)) for first in (10, 60)) + tuple(
    tuple(range(first, first + 140)) for first in (20, 70, 100)
)
ROUNDS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    torch.set_num_threads(1)
    path = write_tiny_checkpoint("qwen3-next", tmp_path_factory.mktemp("model"))
    return load(
        EngineConfig(model_path=str(path), dtype="float32", disagg=DisaggConfig(transport="none")), progress=False
    )


def asked(turn: int) -> list[GenerateRequest]:
    """Each prompt, a little longer every time."""
    return [
        GenerateRequest(
            rid=f"{turn}-{number}", input_ids=(*prompt, *range(9 * turn)), sampling=SamplingParams(max_tokens=6)
        )
        for number, prompt in enumerate(PROMPTS)
    ]


def served(engine: Engine, turns: Sequence[int]) -> list[tuple[int, ...]]:
    """Outputs of one request after the other."""
    outputs = [engine.generate([request])[0] for turn in turns for request in asked(turn)]
    assert engine.audit().problems == ()
    assert engine.scheduler.stats().engine_errors_total == 0
    return [tuple(output.token_ids) for output in outputs]


@pytest.fixture(scope="module")
def expected(model) -> list[tuple[int, ...]]:
    cold = replace(model.config, scheduler=PLAIN, cache=CacheConfig(num_pages=60, enable_prefix_cache=False))
    with Engine.build(model, cold) as engine:
        return served(engine, range(ROUNDS))


def tiered(model: LoadedModel, host: HostConfig) -> EngineConfig:
    return replace(model.config, scheduler=PLAIN, cache=replace(SHORT, host=host))


def counted_copies(engine: Engine, patch: pytest.MonkeyPatch) -> Counter[CopyKind]:
    """Pages and parts by kind, from now on."""
    copies, counts = engine.memory.copies, Counter[CopyKind]()
    submit = copies.submit

    def counted(copy):
        counts[copy.kind] += len(copy.source)
        return submit(copy)

    patch.setattr(copies, "submit", counted)
    return counts


@pytest.mark.parametrize("host_mib", [0.25, 8.0], ids=["short", "ample"])
@pytest.mark.parametrize("policy", WritePolicy)
def test_states_return_from_host_memory_as_they_were(model, expected, monkeypatch, policy, host_mib):
    host = HostConfig(enable_cache=True, write_policy=policy, size_bytes=int(host_mib * (1 << 20)))
    with Engine.build(model, tiered(model, host)) as engine, poisoned_memory(engine):
        counts = counted_copies(engine, monkeypatch)
        assert served(engine, range(ROUNDS)) == expected
    assert counts[CopyKind.HOST_TO_STATE] > 0
    assert counts[CopyKind.HOST_TO_DEVICE] > 0


def test_states_return_from_files_after_a_restart(model, expected, tmp_path, monkeypatch):
    host = HostConfig(enable_cache=True, size_bytes=8 << 20, storage_dir=str(tmp_path), prefetch_timeout=300.0)
    with Engine.build(model, tiered(model, host)) as engine:
        served(engine, range(1))
    with Engine.build(model, tiered(model, host)) as engine, poisoned_memory(engine):
        counts = counted_copies(engine, monkeypatch)
        assert served(engine, range(ROUNDS)) == expected
        assert engine.scheduler.tally.disk_cached_tokens >= 128 * (len(PROMPTS) - 1)
    assert counts[CopyKind.HOST_TO_STATE] > 0


def test_damaged_part_of_a_state_is_computed_again(model, expected, tmp_path):
    host = HostConfig(enable_cache=True, size_bytes=8 << 20, storage_dir=str(tmp_path), prefetch_timeout=300.0)
    with Engine.build(model, tiered(model, host)) as engine:
        served(engine, range(1))
    parts = [path for path in tmp_path.iterdir() if len(path.name.split(".")[0]) > 32]
    assert parts
    for path in parts:
        damaged = bytearray(path.read_bytes())
        damaged[-1] ^= 1
        path.write_bytes(damaged)
    with Engine.build(model, tiered(model, host)) as engine, poisoned_memory(engine):
        assert served(engine, range(1)) == expected[: len(PROMPTS)]
        assert engine.memory.host.tier.traffic.misses > 0
        assert engine.scheduler.tally.disk_cached_tokens == 0


def test_faults_and_retractions_lose_no_state_of_a_tier(model, expected):
    """With overlap: a request that begins again may find the state of its anchor in host memory alone."""
    host = HostConfig(enable_cache=True, size_bytes=8 << 20)
    disturbed = replace(PLAIN, enable_overlap=True, force_fault_every=7, force_retract_every=5, max_retractions=1000)
    with Engine.build(model, replace(tiered(model, host), scheduler=disturbed)) as engine:
        found = [tuple(each.token_ids) for turn in range(ROUNDS) for each in engine.generate(asked(turn))]
        assert engine.audit().problems == ()
        assert engine.scheduler.tally.host_cached_tokens > 0
    assert found == expected
