"""Engines of a device that are warm when they are ready: requests of every kind launch nothing that is new.

Kernels are neither compiled nor run (`launches_that_are_only_noted`): the engine goes through all of its own code, and
what Triton would compile for each launch is compared with what warming up has had it compile.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from tandem_engine.base.names import DigestKind
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
from tandem_engine.disaggregation.digest import makers_on_device
from tandem_engine.engine import Engine, standalone_runs
from tandem_engine.engine.loaded_model import load
from tandem_engine.executor import warm_up
from tandem_engine.executor.warm_up import LISTED_ROWS, Room, WarmStep, list_sizes
from tandem_engine.kernels import compiles
from tandem_engine.kernels.compiles import CompileCounter, Compiles
from tandem_engine.kernels.triton import common
from tandem_engine.kernels.triton.common import DeviceFacts
from tandem_engine.kernels.triton.page_copy import copy_pages
from tandem_engine.kernels.triton.work_list import ALL, MIN_WIDTH, list_constants, splitting_of
from tandem_engine.messages.grammar import GrammarKind, GrammarSpec
from tandem_engine.messages.requests import GenerateRequest, Pooling, PoolingParams
from tandem_testing.digest_pools import digest_pool, signed_words
from tandem_testing.plain_device import PlainDevice
from tandem_testing.quantized_files import KERNEL_KINDS, QWEN3_MOE, write_quantized
from tandem_testing.scheduler_builders import make_message
from tandem_testing.tiny_checkpoints import write_tiny_checkpoint, write_tiny_head
from tandem_testing.triton_kernels.ahead_of_time import (
    SHARED_LIMIT,
    Launch,
    launches_that_are_only_noted,
    launches_that_only_compile,
)
from tandem_testing.triton_kernels.checks import HOPPER
from tandem_testing.triton_kernels.expert_kernels import layers_by_kernels

PENALIZED = {"repetition_penalty": 1.2, "presence_penalty": 0.3}
GRAMMAR = {"grammar": GrammarSpec(kind=GrammarKind.REGEX, source="[^a]+")}
LIMITED = {"allowed_token_ids": (0, 1, 2)}
SAMPLED = {"temperature": 0.8, "seed": 7}
PARAMETERS: tuple[dict[str, object], ...] = (
    {},
    SAMPLED,
    SAMPLED | {"top_k": 5},
    SAMPLED | {"top_p": 0.9},
    SAMPLED | {"min_p": 0.05},
    SAMPLED | {"top_k": 5, "top_p": 0.9, "min_p": 0.05},
    {"logprobs": 3},
    {"logprobs": 0, "logprob_token_ids": (1, 2)},
    {"prompt_logprobs": 2},
    {"logit_bias": ((3, 1.5), (0, -1.0))},
    {"bad_words": ((5,), (1, 2, 3))},
    {"min_tokens": 2, "stop_token_ids": (9,)},
)
EDITS = tuple(
    penalized | masked | limited
    for penalized, masked, limited in product(({}, PENALIZED), ({}, GRAMMAR), ({}, LIMITED))
)
LENGTHS = (1, 15, 16, 17, 70)
"""Of prompts: within a page, a whole one, several, and more than a chunk."""


def requests_of_every_kind() -> list[GenerateRequest]:
    """One of each, with prompts of every length; the last three are choices of one answer, and an embedding."""
    asked = [*PARAMETERS, *EDITS, *(SAMPLED | edits for edits in EDITS)]
    sampled = [
        make_message(f"r{i}", [i % 200 + 1] * LENGTHS[i % len(LENGTHS)], max_tokens=4, **each)
        for i, each in enumerate(asked)
    ]
    choices = [make_message(name, range(20), max_tokens=3, group="choices", **SAMPLED) for name in ("first", "second")]
    pooling = PoolingParams(pooling=Pooling.MEAN)
    return [*sampled, *choices, replace(make_message("pooled", [1] * 20, max_tokens=1), pooling=pooling)]


def new_launches(engine: Engine, noted: set[Launch], requests: Sequence[GenerateRequest]) -> set[str]:
    """Launches of `requests`, alone, one behind the other and at once, that are not in `noted` before."""
    warm = set(noted)
    for request in requests:
        engine.generate([request])
    for steps_between in (1, 0):
        again = [replace(request, rid=f"{request.rid}, {steps_between}") for request in requests]
        engine.generate(again, steps_between=steps_between)
    assert engine.stats().failed_total == 0
    return {f"{launch.kernel}: {launch.key}" for launch in noted - warm}


@contextmanager
def device_engine(checkpoint: Path, **config: object) -> Iterator[tuple[Engine, set[Launch]]]:
    """On a device whose launches are only noted, and what they are."""
    defaults: dict[str, object] = {
        "dtype": "bfloat16",
        "cache": CacheConfig(num_pages=120),
        "scheduler": SchedulerConfig(context_length=128, chunked_prefill_size=32, force_retract_every=7),
        "disagg": DisaggConfig(transport="none"),
    }
    with layers_by_kernels("cpu"), launches_that_are_only_noted(HOPPER) as noted:
        loaded = load(EngineConfig(model_path=str(checkpoint), **{**defaults, **config}), progress=False)
        with Engine.build(loaded, loaded.config, platform=PlainDevice()) as engine:
            yield engine, noted


def is_warm(name: str, **config: object) -> None:
    with TemporaryDirectory(prefix="tandem-warm-") as folder:
        checkpoint_is_warm(write_tiny_checkpoint(name, Path(folder) / "model"), **config)


def checkpoint_is_warm(checkpoint: Path, **config: object) -> None:
    with device_engine(checkpoint, **config) as (engine, noted):
        engine.warm_up()
        assert not new_launches(engine, noted, requests_of_every_kind())


def compile_nothing_that_requests_of_every_kind_launch() -> None:
    is_warm("llama-llama3-rope")


def compile_nothing_for_windows_and_caps_without_graphs() -> None:
    is_warm("gemma2", graphs=GraphConfig(enabled=False))


def compile_nothing_for_experts_over_float8_pages() -> None:
    is_warm("mixtral", cache=CacheConfig(num_pages=120, dtype=KvCacheDtype.FP8_E4M3))


def compile_nothing_for_experts_of_any_tile() -> None:
    """On a device with the shared memory of Hopper, in steps with few pairs of an expert, some, and many."""
    hopper = DeviceFacts(multiprocessors=2, shared_bytes=SHARED_LIMIT[HOPPER])
    prompts = [make_message(f"{tokens}", [1] * tokens, max_tokens=2) for tokens in (3, 60, 120)]
    scheduler = SchedulerConfig(context_length=160, chunked_prefill_size=128)
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory(prefix="tandem-warm-") as folder:
        patch.setattr(common, "INTERPRETER", hopper)
        checkpoint = write_tiny_checkpoint("mixtral", Path(folder) / "model")
        with device_engine(checkpoint, scheduler=scheduler) as (engine, noted):
            engine.warm_up()
            assert not new_launches(engine, noted, prompts)
        assert len([launch for launch in noted if launch.kernel == "down_kernel"]) == 3, "one of each tile"


def compile_nothing_for_latents() -> None:
    is_warm("deepseek-v3")


def compile_nothing_for_states() -> None:
    is_warm("qwen3.5")


def compile_nothing_for_packed_weights() -> None:
    with TemporaryDirectory(prefix="tandem-warm-") as folder:
        write_quantized(Path(folder), "gptq, in another order", kinds=KERNEL_KINDS, head=True, **QWEN3_MOE)
        checkpoint_is_warm(Path(folder))


def compile_nothing_for_pages_in_host_memory() -> None:
    host = HostConfig(enable_cache=True, swap_bytes=1 << 20)
    is_warm("qwen3", cache=CacheConfig(num_pages=24, host=host))


def compile_nothing_for_drafts_of_any_proposer() -> None:
    with TemporaryDirectory(prefix="tandem-warm-") as folder:
        checkpoint = write_tiny_checkpoint("qwen3", Path(folder) / "model")
        head = write_tiny_head(checkpoint, Path(folder) / "head")
        for algorithm, path in (
            (SpecAlgorithm.NGRAM, ""),
            (SpecAlgorithm.DRAFT, str(checkpoint)),
            (SpecAlgorithm.EAGLE, str(head)),
        ):
            speculative = SpecConfig(algorithm=algorithm, draft_model_path=path, adaptive=False)
            checkpoint_is_warm(checkpoint, speculative=speculative)


def compile_nothing_for_digests_of_any_page() -> None:
    """However many slots are in use, and whichever heads a peer's rank has."""
    for slots, head_dim in ((16, 64), (160, 3)):
        pool = digest_pool(slots, torch.bfloat16, head_dim=head_dim)
        with launches_that_are_only_noted(HOPPER) as noted:
            make = makers_on_device(signed_words(pool), pool.layout)
            warm = set(noted)
            parts = [range(a, b) for b in range(pool.layout.heads + 1) for a in range(b)]
            for kind, tail, heads, count in product(DigestKind, range(slots), parts, (1, 2, 16)):
                pages = np.zeros(count, np.int64)
                make(kind, pages, pages.view(np.uint64), tail, heads)
        assert {launch.kernel for launch in warm} == {"sampled_kernel", "full_kernel"}
        assert noted == warm


def compile_once_for_each_size_of_list() -> None:
    assert LISTED_ROWS == MIN_WIDTH
    splitting = splitting_of(num_heads=4, kv_heads=2, max_queries=1, block_m=64)
    widths = {list_constants(splitting, rows, span=ALL, tiles=False)["WIDTH"] for rows in (1, *list_sizes(5000))}
    assert widths == {list_constants(splitting, r, span=ALL, tiles=False)["WIDTH"] for r in range(1, 5001)}


def compile_a_kernel_while_serving_and_it_is_counted_and_named() -> None:
    """By Triton itself, for a device that is not there."""
    counter, output = CompileCounter(), StringIO()
    handler = logging.StreamHandler(output)
    pages, ids = torch.zeros(2, 64, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
    with launches_that_only_compile(HOPPER) as compiled:
        counter.watch()
        counter.watch()
        copy_pages(pages, ids, ids)
        assert counter.counts == Compiles(starting=1)
        counter.serve()
        copy_pages(pages, ids, ids)
        assert counter.counts == Compiles(starting=1), "what is compiled is not compiled again"
        compiles.logger.addHandler(handler)
        copy_pages(pages[:, :63], ids, ids)
        compiles.logger.removeHandler(handler)
    assert counter.counts == Compiles(starting=1, serving=1)
    assert compiled == ["copy_pages_kernel"] * 2, "the listener that was set before is still called"
    line = output.getvalue()
    assert "kernel copy_pages_kernel was" in line
    assert "while serving" in line
    assert "(pool: *u8/16, sources: *i64, targets: *i64, page_stride: i32/16, page_words: i32, BLOCK=4096), 8" in line


def compile_less_and_a_step_left_out_of_the_list_is_found() -> None:
    """Each way in which a request's kernels differ from a plain one's is missed when its step is."""
    everything = warm_up.request_steps
    for missing, kernel in (
        ("penalties, a grammar, allowed tokens", "edit_kernel"),
        ("copied pages", "copy_pages_kernel"),
    ):

        def without(room: Room, *, missing: str = missing, **facts: int) -> Iterator[WarmStep]:
            return (step for step in everything(room, **facts) if step.name != missing)

        with pytest.MonkeyPatch.context() as patch, TemporaryDirectory(prefix="tandem-warm-") as folder:
            patch.setattr(standalone_runs, "request_steps", without)
            with device_engine(write_tiny_checkpoint("qwen2", Path(folder) / "model")) as (engine, noted):
                engine.warm_up()
                found = new_launches(engine, noted, requests_of_every_kind())
        assert {launch.partition(":")[0] for launch in found} == {kernel}, missing
