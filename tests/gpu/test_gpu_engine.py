"""The engine on a real GPU: exactness, graphs, no waiting, memory, and two roles on one card."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tandem_engine.base.errors import ConfigError
from tandem_engine.config import (
    CacheConfig,
    DisaggConfig,
    EngineConfig,
    GraphConfig,
    HostConfig,
    KvCacheDtype,
    SchedulerConfig,
    SpecAlgorithm,
    SpecConfig,
)
from tandem_engine.engine import Engine
from tandem_engine.engine.loaded_model import LoadedModel, load
from tandem_engine.kernels.compiles import COMPILED
from tandem_engine.messages.requests import GenerateRequest
from tandem_engine.messages.sampling import SamplingParams
from tandem_engine.scheduler.output_stream import discard
from tandem_lab.verify.paths import WITHOUT_GRAPHS
from tandem_testing.exactness import (
    CACHED,
    CHUNKED,
    DISAGGREGATED,
    HOST,
    MIXED,
    RETRACTED,
    SWAPPED,
    TWICE,
    run_paths_of,
)
from tandem_testing.tiny_checkpoints import write_tiny_checkpoint, write_tiny_head
from tandem_testing.triton_kernels.warm_engine import requests_of_every_kind

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
needs_nixl = pytest.mark.skipif(find_spec("nixl") is None, reason="needs nixl")

DEVICE = "cuda"
ALONE = [
    CHUNKED,
    CACHED,
    MIXED,
    TWICE,
    WITHOUT_GRAPHS,
    RETRACTED,
    "edited: mixed, staggered",
    SWAPPED,
    HOST,
    "n-gram drafts",
    "drafts by the model itself",
    "EAGLE drafts",
    "EAGLE drafts, retracted",
    "every fifth step raises",
]
HANDED_OVER = [DISAGGREGATED, "disaggregated, layer by layer", "drained mid-stream", "prefix fetched over NIXL"]


@pytest.fixture(scope="module", params=["qwen3", "gemma2", "llama-llama3-rope"])
def checkpoint(request, tmp_path_factory) -> Path:
    """With a head beside it."""
    target = write_tiny_checkpoint(request.param, tmp_path_factory.mktemp("models") / "model")
    write_tiny_head(target, Path(f"{target}-eagle"))
    return target


@pytest.fixture(scope="module")
def model(checkpoint) -> LoadedModel:
    return load(EngineConfig(model_path=str(checkpoint), dtype="float32", device=DEVICE), progress=False)


@contextmanager
def no_waiting() -> Iterator[None]:
    """CUDA raises where the host would wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def config_of(model: LoadedModel, **changes: object) -> EngineConfig:
    settings = {
        "cache": CacheConfig(page_size=16, num_pages=128),
        "scheduler": SchedulerConfig(context_length=256, max_running_requests=8, audit_every_step=False),
        "disagg": DisaggConfig(transport="none"),
        **changes,
    }
    return replace(model.config, **settings)


def head_of(model: LoadedModel) -> SpecConfig:
    return SpecConfig(
        algorithm=SpecAlgorithm.EAGLE, draft_model_path=f"{model.config.model_path}-eagle", adaptive=False
    )


def requests(count: int, *, tokens: int = 40) -> list[GenerateRequest]:
    return [
        GenerateRequest(
            rid=f"r{index}",
            input_ids=tuple(range(3 + index, 20 + 5 * index)),
            sampling=SamplingParams(
                max_tokens=tokens,
                ignore_eos=True,
                temperature=0.0 if index % 2 else 0.9,
                top_p=1.0 if index % 3 else 0.8,
                seed=index,
            ),
        )
        for index in range(count)
    ]


def outputs(model: LoadedModel, config: EngineConfig) -> list[tuple[int, ...]]:
    with Engine.build(model, config) as engine:
        return [generation.token_ids for generation in engine.generate(requests(6), steps_between=2)]


def test_engine_paths_match_transformers_tokens(model):
    results = run_paths_of(model, ALONE)
    assert {result.path: result.difference for result in results} == dict.fromkeys(ALONE)


def test_bfloat16_is_within_the_stated_bounds_on_every_path(checkpoint):
    """Of what transformers makes of the same tokens in float32, on the CPU."""
    rounded = load(EngineConfig(model_path=str(checkpoint), dtype="bfloat16", device=DEVICE), progress=False)
    results = run_paths_of(rounded, ALONE)
    assert {result.path: result.difference for result in results} == dict.fromkeys(ALONE)


@needs_nixl
def test_two_engines_on_one_card_hand_over_by_nixl(model):
    results = run_paths_of(model, HANDED_OVER)
    assert {result.path: result.difference for result in results} == dict.fromkeys(HANDED_OVER)


@needs_nixl
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_engines_on_a_gpu_that_is_not_the_first(checkpoint):
    """Kernels of threads, the scheduler's and the transfer's, run where the pool is."""
    model = load(EngineConfig(model_path=str(checkpoint), dtype="float32", device="cuda:1"), progress=False)
    paths = [CHUNKED, "EAGLE drafts", DISAGGREGATED]
    results = run_paths_of(model, paths)
    assert {result.path: result.difference for result in results} == dict.fromkeys(paths)


@pytest.mark.parametrize("kind", [KvCacheDtype.FP8_E4M3, KvCacheDtype.FP8_E5M2])
def test_paths_agree_over_pages_of_float8(model, kind):
    paths = [CHUNKED, CACHED, MIXED, WITHOUT_GRAPHS, RETRACTED, SWAPPED]
    results = run_paths_of(model, paths, kv_dtype=kind)
    assert {result.path: result.difference for result in results} == dict.fromkeys(paths)


def test_outputs_are_the_same_with_graphs_and_without(model):
    assert outputs(model, config_of(model)) == outputs(model, config_of(model, graphs=GraphConfig(enabled=False)))


def test_closed_engine_graphs_are_not_freed_during_capture(model):
    """They are garbage in cycles, and with these thresholds any allocation could collect it."""
    expected = outputs(model, config_of(model))
    gc.disable()
    for _ in range(3):
        cycle: list[object] = [torch.cuda.CUDAGraph()]
        cycle.append(cycle)
        with torch.cuda.graph(cycle[0]):
            torch.zeros(1, device=DEVICE)
    thresholds = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    gc.enable()
    try:
        del cycle
        assert outputs(model, config_of(model)) == expected
    finally:
        gc.set_threshold(*thresholds)


def test_two_runs_on_a_gpu_have_bitwise_equal_outputs(model):
    assert outputs(model, config_of(model)) == outputs(model, config_of(model))


@pytest.mark.parametrize("graphs", [True, False])
@torch.inference_mode()
def test_nothing_waits_for_the_device_while_requests_decode(model, graphs):
    config = config_of(model, graphs=GraphConfig(enabled=graphs))
    with Engine.build(model, config, sink=discard) as engine:
        for request in requests(6):
            engine.add(request)
        for _ in range(12):
            engine.step()
        with no_waiting():
            for _ in range(16):
                engine.step()
        assert engine.scheduler.stats().engine_errors_total == 0
        while not engine.idle:
            engine.step()


@torch.inference_mode()
def test_drafting_head_syncs_only_for_results(model):
    with Engine.build(model, config_of(model, speculative=head_of(model)), sink=discard) as engine:
        for request in requests(6):
            engine.add(request)
        for _ in range(12):
            engine.step()
        with no_waiting():
            for _ in range(8):
                engine.step()
        stats = engine.scheduler.stats()
        assert stats.engine_errors_total == 0
        assert engine.stats().speculation.drafted_total > 0
        while not engine.idle:
            engine.step()


@pytest.mark.gpu_alone
@pytest.mark.parametrize("drafts", [True, False])
@pytest.mark.parametrize("host", [HostConfig(enable_cache=True, size_bytes=64 << 20), HostConfig()])
def test_engine_stays_within_its_share_of_the_card(model, host, drafts):
    share = 0.2
    cache = CacheConfig(page_size=16, mem_fraction_static=share, host=host)
    spec = head_of(model) if drafts else SpecConfig()
    with Engine.build(model, config_of(model, cache=cache, speculative=spec)) as engine:
        engine.generate(requests(6))
        total = torch.cuda.mem_get_info()[1]
        assert torch.cuda.memory_reserved() <= share * total
        assert engine.total_pages > 128


def test_memory_share_too_small_error_names_the_flag(model):
    cache = CacheConfig(page_size=16, mem_fraction_static=1e-5)
    with pytest.raises(ConfigError, match="raise --mem-fraction-static"):
        Engine.build(model, config_of(model, cache=cache))


def test_gpu_that_is_not_there_is_refused(checkpoint):
    count = torch.cuda.device_count()
    with pytest.raises(ConfigError, match=f"needs GPU {count}"):
        load(EngineConfig(model_path=str(checkpoint), device=f"cuda:{count}"), progress=False)


def test_dtype_auto_is_bfloat16_for_bfloat16_checkpoint(checkpoint):
    loaded = load(EngineConfig(model_path=str(checkpoint), device=DEVICE), progress=False)
    assert loaded.dtype is torch.bfloat16
    with Engine.build(loaded, config_of(loaded)) as engine:
        assert engine.self_test().decode_step_s > 0
        assert all(len(generation.token_ids) == 40 for generation in engine.generate(requests(6)))


def test_requests_of_every_kind_compile_nothing_more(checkpoint):
    COMPILED.watch()
    loaded = load(EngineConfig(model_path=str(checkpoint), device=DEVICE), progress=False)
    with Engine.build(loaded, config_of(loaded)) as engine:
        engine.self_test()
        engine.warm_up()
        ready = COMPILED.counts
        assert ready.starting > 0
        engine.generate(requests_of_every_kind(), steps_between=1)
    assert COMPILED.counts == ready
