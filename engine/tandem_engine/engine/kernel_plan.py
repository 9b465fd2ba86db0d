"""All kernels that an engine on a CPU calls, from its configuration alone, before any weights are read.

The list is in the order of building: what takes longest first, so that builders end together. What it misses is
compiled by the engine itself when it is called; `test_kernel_plan.py` has it miss nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from tandem_engine.config import EngineConfig, ModelConfig, ModelImpl
from tandem_engine.engine.loaded_model import require_loadable
from tandem_engine.executor.memory_profile import meter_for
from tandem_engine.kernels.store.keys import KernelSpec
from tandem_engine.memory.cache_groups import common_row
from tandem_engine.memory.pool import kv_dtype
from tandem_engine.model.attention.backend import distinct
from tandem_engine.model.decoder import attention_specs
from tandem_engine.model.loader import resolve_dtype
from tandem_engine.model.weights import heads_of_rank, kv_rows

NO_TRANSPORT = "none"


class KernelPlan(NamedTuple):
    """Kernels of one rank of an engine."""

    step: tuple[KernelSpec, ...]
    """Of small steps; an engine serves without it, more slowly."""
    others: tuple[KernelSpec, ...]

    @property
    def all(self) -> tuple[KernelSpec, ...]:
        return self.step + self.others


def kernel_plan(config: EngineConfig, facts: ModelConfig) -> KernelPlan:
    """For a model of `facts`; empty for another device than a CPU."""
    if torch.device(config.device).type != "cpu":
        return KernelPlan((), ())
    dtype = resolve_dtype(config.dtype, facts, device=config.device)
    pages = kv_dtype(config.cache.dtype, dtype)
    transfers = _of_transfers(facts, pages) if config.disagg.transport != NO_TRANSPORT else []
    rows, step = _of_fused_steps(config, facts, dtype) if _is_fused(config, facts, dtype) else ([], [])
    attention = _of_attention(config, facts, pages) if facts.latent is None else []
    return KernelPlan(
        tuple(step), (*attention, *rows, *_of_products(facts, dtype), *_of_steps(facts, pages), *transfers)
    )


@contextmanager
def kernels_built(config: EngineConfig, *, late_step: bool) -> Iterator[None]:
    """While there is an engine of `config`: other processes compile what its plan lacks.

    `late_step`: do not wait for the kernel of small steps, but use it from the step on when it is there.
    """
    if torch.device(config.device).type != "cpu":
        yield
        return
    from tandem_engine.kernels.cpu.builders import built_elsewhere

    plan = kernel_plan(config, require_loadable(config))
    first, late = (plan.others, plan.step) if late_step else (plan.all, ())
    with built_elsewhere(first, meter_for("cpu").available(), late=late):
        yield


def _is_fused(config: EngineConfig, facts: ModelConfig, dtype: torch.dtype) -> bool:
    from tandem_engine.model.cpu.step import covers

    ours = facts.impl is ModelImpl.TANDEM and not _stay_quantized(facts)
    return ours and config.parallel.tp_size == 1 and covers(facts, dtype, distinct(attention_specs(facts))[0])


def _stay_quantized(facts: ModelConfig) -> bool:
    """Whether projections do, as `quantization.scheme.described` has it."""
    return "held " in facts.quantization


def _of_fused_steps(
    config: EngineConfig, facts: ModelConfig, dtype: torch.dtype
) -> tuple[list[KernelSpec], list[KernelSpec]]:
    """Kernels over rows, and those of small steps: without adapters, and with them where there may be any."""
    from tandem_engine.kernels.cpu.decoder_step import build_step_kernel
    from tandem_engine.kernels.cpu.row_ops import build_gate_kernel, build_norm_kernel, build_place_kernel
    from tandem_engine.kernels.cpu.tensors import dtype_of

    number, group = dtype_of(dtype), facts.num_heads // facts.num_kv_heads
    place = build_place_kernel.spec(number, facts.head_dim, group)
    rows = [place, build_gate_kernel.spec(number), build_norm_kernel.spec(number)]
    adapted = (False, True) if config.adapters.may_exist else (False,)
    return rows, [build_step_kernel.spec(number, facts.head_dim, group, adapted=each) for each in adapted]


def _of_attention(config: EngineConfig, facts: ModelConfig, pages: torch.dtype) -> list[KernelSpec]:
    from tandem_engine.kernels.cpu.block_attention import build_block_kernel
    from tandem_engine.kernels.cpu.paged_attention import build_paged_kernel
    from tandem_engine.kernels.cpu.tensors import as_array

    number, size = as_array(torch.empty(0, dtype=pages)).dtype, config.parallel.tp_size
    query, rows = heads_of_rank(facts, size).query, dict.fromkeys(kv_rows(facts, size))
    capped = sorted({kind.soft_cap is not None for kind in distinct(attention_specs(facts))[0]})
    paged = [
        build_paged_kernel.spec(number, row.width, query // row.heads, capped=each) for row in rows for each in capped
    ]
    return [build_block_kernel.spec(number), *paged]


def _of_products(facts: ModelConfig, dtype: torch.dtype) -> list[KernelSpec]:
    """Of few tokens by weights that oneDNN has packed, and of any by matrices of int8."""
    from tandem_engine.kernels.cpu.gemm import build_product_kernel
    from tandem_engine.kernels.cpu.tensors import dtype_of

    kinds = (False, True) if _stay_quantized(facts) else (False,)
    return [build_product_kernel.spec(dtype_of(dtype), int8=int8) for int8 in kinds]


def _of_steps(facts: ModelConfig, pages: torch.dtype) -> list[KernelSpec]:
    """What steps of any model call from Python; torch attends over latents."""
    from tandem_engine.kernels.cpu.attention_work import cut_queries, group_tasks, store
    from tandem_engine.kernels.cpu.first_places import find_in_blocks
    from tandem_engine.kernels.cpu.machine_code import array
    from tandem_engine.kernels.cpu.tensors import as_array

    number = as_array(torch.empty(0, dtype=pages)).dtype.name
    some, many = array("int64", 1), array("int64", 2)
    sampling = find_in_blocks.spec(array("float32", 2), array("float32", 1), some)
    if facts.latent is not None:
        return [sampling]
    return [
        group_tasks.spec(many, many, array("int32", 2), "int64", "int64", "int64"),
        store.spec(array(number, 6), "int64", array(number, 3), array(number, 3), some),
        cut_queries.spec(many, "int64", some, "int64", "int64", "int64"),
        sampling,
    ]


def _of_transfers(facts: ModelConfig, pages: torch.dtype) -> list[KernelSpec]:
    from tandem_engine.disaggregation.digest_words import word_bytes_of
    from tandem_engine.kernels.cpu.machine_code import array
    from tandem_engine.kernels.cpu.page_digests import full_digests, sampled_digests
    from tandem_engine.kernels.cpu.page_runs import merge_runs

    width = common_row(kv_rows(facts, 1)).width
    words = array(f"uint{8 * word_bytes_of(width * pages.itemsize)}", 2)
    places, keys = array("int64", 1), array("uint64", 1)
    return [
        sampled_digests.spec(words, places, keys, places, *["int64"] * 5, keys),
        full_digests.spec(words, places, keys, keys),
        merge_runs.spec(keys, keys, "uint64", "uint64", "uint64", array("uint64", 3)),
    ]
