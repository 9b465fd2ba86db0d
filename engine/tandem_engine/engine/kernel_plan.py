"""All kernels that an engine on a CPU calls, from its configuration alone, before any weights are read.

The list is in the order of building: what takes longest first, so that builders end together. What it misses is
compiled by the engine itself when it is called; `tests/integration/test_kernel_plan.py` has it miss nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tandem_engine.config import EngineConfig, ModelConfig, ModelImpl
from tandem_engine.engine.loaded_model import require_loadable
from tandem_engine.executor.memory_profile import meter_for
from tandem_engine.kernels.store.keys import KernelSpec
from tandem_engine.memory.pool import kv_dtype
from tandem_engine.model.attention.backend import distinct
from tandem_engine.model.decoder import attention_specs
from tandem_engine.model.loader import resolve_dtype
from tandem_engine.model.weights import heads_of_rank

NO_TRANSPORT = "none"


def kernel_plan(config: EngineConfig, facts: ModelConfig) -> tuple[KernelSpec, ...]:
    """For one rank of an engine with a model of `facts`; nothing for another device than a CPU."""
    if torch.device(config.device).type != "cpu":
        return ()
    dtype = resolve_dtype(config.dtype, facts, device=config.device)
    pages = kv_dtype(config.cache.dtype, dtype)
    plan = [*_of_layers(config, facts, dtype, pages), *_of_steps(pages)]
    return (*plan, *_of_transfers(facts, pages)) if config.disagg.transport != NO_TRANSPORT else tuple(plan)


@contextmanager
def kernels_built(config: EngineConfig) -> Iterator[None]:
    """While the engine of `config` is made: other processes compile what its plan lacks."""
    if torch.device(config.device).type != "cpu":
        yield
        return
    from tandem_engine.kernels.cpu.builders import built_elsewhere

    plan = kernel_plan(config, require_loadable(config))
    with built_elsewhere(plan, meter_for("cpu").available()):
        yield


def _of_layers(config: EngineConfig, facts: ModelConfig, dtype: torch.dtype, pages: torch.dtype) -> list[KernelSpec]:
    from tandem_engine.kernels.cpu.block_attention import build_block_kernel
    from tandem_engine.kernels.cpu.decoder_step import build_step_kernel
    from tandem_engine.kernels.cpu.gemm import build_product_kernel
    from tandem_engine.kernels.cpu.numbers import as_array, dtype_of
    from tandem_engine.kernels.cpu.paged_attention import build_paged_kernel
    from tandem_engine.kernels.cpu.row_ops import build_gate_kernel, build_norm_kernel, build_place_kernel
    from tandem_engine.model.cpu.step import covers

    heads = heads_of_rank(facts, config.parallel.tp_size)
    group, stored, number = heads.query // heads.kv, as_array(torch.empty(0, dtype=pages)).dtype, dtype_of(dtype)
    kinds, _ = distinct(attention_specs(facts))
    ours = facts.impl is ModelImpl.TANDEM and not facts.quantization
    plan = []
    if ours and config.parallel.tp_size == 1 and covers(facts, dtype, kinds):
        plan += [
            build_step_kernel.spec(number, facts.head_dim, group),
            build_place_kernel.spec(number, facts.head_dim, group),
            build_norm_kernel.spec(number),
            build_gate_kernel.spec(number),
        ]
    attention = [build_block_kernel.spec(stored)]
    capped = {kind.soft_cap is not None for kind in kinds}
    attention += [build_paged_kernel.spec(stored, facts.head_dim, group, capped=each) for each in sorted(capped)]
    return [*plan[:1], *attention, *plan[1:], build_product_kernel.spec(number)]


def _of_steps(pages: torch.dtype) -> list[KernelSpec]:
    """What steps of any model call from Python."""
    from tandem_engine.kernels.cpu.attention_work import cut_queries, group_tasks, store
    from tandem_engine.kernels.cpu.kept import array
    from tandem_engine.kernels.cpu.numbers import as_array
    from tandem_engine.sampling.sampler import find_in_blocks

    number = as_array(torch.empty(0, dtype=pages)).dtype.name
    some, many = array("int64", 1), array("int64", 2)
    return [
        group_tasks.spec(many, many, array("int32", 2), "int64", "int64", "int64"),
        store.spec(array(number, 6), "int64", array(number, 3), array(number, 3), some),
        cut_queries.spec(many, "int64", some, "int64", "int64", "int64"),
        find_in_blocks.spec(array("float32", 2), array("float32", 1), some),
    ]


def _of_transfers(facts: ModelConfig, pages: torch.dtype) -> list[KernelSpec]:
    from tandem_engine.disaggregation.digest_words import full_digests, sampled_digests, word_bytes_of
    from tandem_engine.disaggregation.nixl.layout import merge_runs
    from tandem_engine.kernels.cpu.kept import array

    words = array(f"uint{8 * word_bytes_of(facts.head_dim * pages.itemsize)}", 2)
    places, keys = array("int64", 1), array("uint64", 1)
    return [
        sampled_digests.spec(words, places, keys, places, "int64", "int64", "int64", "int64", keys),
        full_digests.spec(words, places, keys, keys),
        merge_runs.spec(keys, keys, "uint64", "uint64", "uint64", array("uint64", 3)),
    ]
