"""Steps with adapters as compiled code equal the layers one by one, padding and wanted rows included."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem_engine.config import ModelConfig
from tandem_engine.forward.adapter_rows import NO_ADAPTER, AdapterRows
from tandem_engine.forward.batch import ForwardBatch, wanted_tokens
from tandem_engine.memory.pool import KvPool
from tandem_engine.model.adapters.step import StepAdapters
from tandem_engine.model.attention.cpu import CpuAttention
from tandem_engine.model.cpu.step import LargeStep, SmallStep
from tandem_engine.model.decoder import Decoder, build_decoder
from tandem_testing.adapters import random_adapter
from tandem_testing.forward_builders import PageDealer, make_batch
from tandem_testing.random_weights import RandomWeights, small_config


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build(dtype: torch.dtype) -> Decoder:
    config = small_config()
    return build_decoder(config, RandomWeights(config=config, dtype=dtype), positions=config.max_position)


def filled_pool(config: ModelConfig, dtype: torch.dtype) -> KvPool:
    pool = KvPool(
        num_pages=64,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=16,
        dtype=dtype,
        device="cpu",
    )
    pool.data.copy_(torch.randn(pool.data.shape, generator=torch.Generator().manual_seed(1)))
    return pool


def compute(model: Decoder, batch: ForwardBatch, adapters: StepAdapters | None, dtype: torch.dtype) -> Tensor:
    pool = filled_pool(model.config, dtype)
    plan = CpuAttention(pool, num_heads=model.config.num_heads, specs=model.attention).plan(batch)
    with torch.inference_mode():
        return model.forward(batch.input_ids, batch.positions, plan, wanted_tokens(batch), adapters)


def adapters_of(model: Decoder, batch: ForwardBatch, *slots: int, dtype: torch.dtype = torch.float32) -> StepAdapters:
    rows = AdapterRows.of(batch, np.array(slots))
    assert rows is not None
    return StepAdapters(
        rows=rows, slots=[random_adapter(model.config, seed=seed, rank=seed, dtype=dtype) for seed in (1, 3)]
    )


def batch_of(model: Decoder, *extends: int, decodes: int) -> ForwardBatch:
    dealer = PageDealer(pool=filled_pool(model.config, torch.float32))
    made = [dealer.seq(20 + length, length) for length in extends] + [dealer.decode(30) for _ in range(decodes)]
    ids = iter(range(1, 1000))
    return make_batch([replace(seq, input_ids=[next(ids) % 96 for _ in range(seq.extend_len)]) for seq in made])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slots", [(0, NO_ADAPTER, 1, 0), (1, 1, 1, 1), (NO_ADAPTER, NO_ADAPTER, NO_ADAPTER, 1)])
@pytest.mark.parametrize("extends", [(20, 15), (3, 2)])
def test_compiled_step_equals_the_layers(extends: tuple[int, int], slots: tuple[int, ...], dtype: torch.dtype) -> None:
    model = build(dtype)
    batch = batch_of(model, *extends, decodes=2)
    adapters = adapters_of(model, batch, *slots, dtype=dtype)
    compiled = compute(model, batch, adapters, dtype)
    apart = {"atol": 5e-5, "rtol": 1e-5} if dtype is torch.float32 else {"atol": 2**-5, "rtol": 2**-5}
    torch.testing.assert_close(compiled, compute(replace(model, fused=None), batch, adapters, dtype), **apart)
    bare = compute(model, batch, None, dtype)
    for sequence, slot in enumerate(slots):
        changed = float((compiled[sequence] - bare[sequence]).abs().max())
        assert changed > 0.05 if slot != NO_ADAPTER else changed <= apart["atol"]


def test_adapted_decodes_leave_the_single_call() -> None:
    model = build(torch.float32)
    assert model.fused is not None
    batch = batch_of(model, decodes=4)
    pool = filled_pool(model.config, torch.float32)
    plan = CpuAttention(pool, num_heads=model.config.num_heads, specs=model.attention).plan(batch)
    adapters = adapters_of(model, batch, 0, NO_ADAPTER, 1, 0)
    assert isinstance(model.fused.step_of(plan, 4), SmallStep)
    assert isinstance(model.fused.step_of(plan, 4, adapters), LargeStep)
