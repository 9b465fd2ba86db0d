"""Steps with adapters as compiled code equal the layers one by one, padding and wanted rows included."""

import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from tandem_engine.config import ModelConfig
from tandem_engine.forward.adapter_rows import NO_ADAPTER, AdapterRows
from tandem_engine.forward.batch import ForwardBatch, wanted_tokens
from tandem_engine.memory.pool import KvPool
from tandem_engine.model.adapters.step import StepAdapters
from tandem_engine.model.adapters.tensor_names import Site
from tandem_engine.model.adapters.weights import AdapterPart, AdapterWeights, SiteWeights
from tandem_engine.model.attention.cpu import CpuAttention
from tandem_engine.model.cpu import step
from tandem_engine.model.cpu.step import LargeStep, SmallStep
from tandem_engine.model.decoder import Decoder, build_decoder
from tandem_testing.adapters import SEVEN, random_adapter
from tandem_testing.forward_builders import PageDealer, make_batch
from tandem_testing.random_weights import RandomWeights, small_config


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build(dtype: torch.dtype, **fields: object) -> Decoder:
    config = small_config(**fields)
    weights = RandomWeights(config=config, dtype=dtype)
    return build_decoder(config, weights, positions=config.max_position, adapted=True)


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


def rows_of(batch: ForwardBatch, slots: npt.NDArray[np.int64]) -> AdapterRows:
    rows = AdapterRows.of(slots, lens=batch.extend_lens, wanted=wanted_tokens(batch))
    assert rows is not None
    return rows


def adapters_of(model: Decoder, batch: ForwardBatch, *slots: int, dtype: torch.dtype = torch.float32) -> StepAdapters:
    rows = rows_of(batch, np.array(slots))
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


DTYPES = [torch.float32, torch.bfloat16]
SUBSETS: dict[str, Sequence[str]] = {
    "all": SEVEN,
    "query": ["q_proj"],
    "key and value": ["k_proj", "v_proj"],
    "up": ["up_proj"],
    "rows": ["o_proj", "down_proj"],
}


def require_small_step(model: Decoder, batch: ForwardBatch, adapters: StepAdapters, dtype: torch.dtype) -> None:
    """One call, which gives what the layers one by one do."""
    assert model.fused is not None
    pool = filled_pool(model.config, dtype)
    plan = CpuAttention(pool, num_heads=model.config.num_heads, specs=model.attention).plan(batch)
    assert isinstance(model.fused.step_of(plan, batch.num_tokens, adapters), SmallStep)
    compiled = compute(model, batch, adapters, dtype)
    by_layers = compute(replace(model, fused=None), batch, adapters, dtype)
    apart = {"atol": 5e-5, "rtol": 1e-5} if dtype is torch.float32 else {"atol": 2**-5, "rtol": 2**-5}
    torch.testing.assert_close(compiled, by_layers, **apart)


def slots_of(adapters: int) -> list[int]:
    """Of eleven sequences: the model alone, then each adapter, from the last to the first and again."""
    return [NO_ADAPTER if index % 4 == 0 else -index % adapters for index in range(11)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 3, 8])
@pytest.mark.parametrize("rank", [1, 4, 8, 16, 64])
def test_adapters_of_any_rank_share_one_call(rank: int, count: int, dtype: torch.dtype) -> None:
    model = build(dtype)
    batch = batch_of(model, decodes=11)
    rows = rows_of(batch, np.array(slots_of(count)))
    weights = [random_adapter(model.config, seed=seed, rank=rank, dtype=dtype) for seed in range(1, count + 1)]
    require_small_step(model, batch, StepAdapters(rows=rows, slots=weights), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("subset", SUBSETS)
def test_adapters_of_some_projections_share_one_call(subset: str, dtype: torch.dtype) -> None:
    model = build(dtype)
    batch = batch_of(model, 4, 1, decodes=3)
    rows = rows_of(batch, np.array([0, 1, NO_ADAPTER, 1, 2]))
    weights = [
        random_adapter(model.config, seed=1, rank=8, dtype=dtype, modules=SUBSETS[subset]),
        random_adapter(model.config, seed=2, rank=16, dtype=dtype, layers=[1]),
        random_adapter(model.config, seed=3, rank=20, dtype=dtype),
    ]
    require_small_step(model, batch, StepAdapters(rows=rows, slots=weights), dtype)


@pytest.mark.parametrize("fields", [{"attention_bias": True, "mlp_bias": True}, {"intermediate_size": 256}])
def test_biases_and_whole_panels_have_what_adapters_add(fields: dict[str, object]) -> None:
    model = build(torch.float32, **fields)
    batch = batch_of(model, decodes=4)
    require_small_step(model, batch, adapters_of(model, batch, 0, NO_ADAPTER, 1, 0), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_adapters_in_bfloat16_share_one_call(dtype: torch.dtype) -> None:
    """Beside others, and in large steps too."""
    model = build(dtype)
    weights = [
        random_adapter(model.config, seed=seed, rank=rank, dtype=dtype, halves=halves)
        for seed, (rank, halves) in enumerate(((8, "AB"), (16, ""), (5, "A"), (20, "B")), start=1)
    ]
    batch = batch_of(model, 4, 1, decodes=4)
    rows = rows_of(batch, np.array([0, 1, NO_ADAPTER, 2, 3, 0]))
    require_small_step(model, batch, StepAdapters(rows=rows, slots=weights), dtype)
    wide = [replace(each, sites=widened(each, dtype)) for each in weights]
    for few in (batch, batch_of(model, 20, 15, decodes=4)):
        mine, theirs = (
            compute(
                model, few, StepAdapters(rows=rows_of(few, np.array([0, 1, NO_ADAPTER, 2, 3, 0])), slots=slots), dtype
            )
            for slots in (weights, wide)
        )
        assert torch.equal(mine, theirs), "to widen numbers is exact"


def widened(weights: AdapterWeights, dtype: torch.dtype) -> Mapping[tuple[int, Site], SiteWeights]:
    """The same numbers, A in float32 and B in the model's dtype."""
    return {
        place: SiteWeights(
            a=site.a.float(),
            parts=tuple(
                AdapterPart.of(rows=part.rows, outputs=part.outputs, b=part.b.to(dtype), scale=part.scale)
                for part in site.parts
            ),
        )
        for place, site in weights.sites.items()
    }


def test_verified_drafts_share_one_call() -> None:
    model = build(torch.float32)
    batch = batch_of(model, 4, 5, 3, decodes=2)
    require_small_step(model, batch, adapters_of(model, batch, 0, NO_ADAPTER, 1, 0, 1), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_have_the_same_bits_in_any_small_step(dtype: torch.dtype) -> None:
    model = build(dtype)
    slots = (0, NO_ADAPTER, 1, 0, 1, NO_ADAPTER)
    batch = batch_of(model, decodes=len(slots))
    mixed = compute(model, batch, adapters_of(model, batch, *slots, dtype=dtype), dtype)
    bare = compute(model, batch, None, dtype)
    for index, slot in enumerate(slots):
        alone = bare
        if slot != NO_ADAPTER:
            alone = compute(model, batch, adapters_of(model, batch, *[slot] * len(slots), dtype=dtype), dtype)
        assert torch.equal(mixed[index], alone[index])


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_compute_the_same_bits_with_adapters(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "PARALLEL_BYTES", 0)
    model = build(dtype, num_layers=3)
    batch = batch_of(model, 3, decodes=4)
    adapters = adapters_of(model, batch, 0, NO_ADAPTER, 1, 0, 1, dtype=dtype)
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(compute(model, batch, adapters, dtype))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_addresses_of_an_adapter_are_gone_with_it() -> None:
    model = build(torch.float32)
    assert model.fused is not None
    batch = batch_of(model, decodes=2)
    adapters = adapters_of(model, batch, 0, 1)
    compute(model, batch, adapters, torch.float32)
    assert model.fused.tables.count == 2
    del adapters
    gc.collect()
    assert model.fused.tables.count == 0


def test_model_without_adapters_has_no_kernel_for_them() -> None:
    config = small_config()
    model = build_decoder(config, RandomWeights(config=config), positions=config.max_position)
    assert model.fused is not None
    assert model.fused.adapted is None
    batch = batch_of(model, decodes=4)
    pool = filled_pool(model.config, torch.float32)
    plan = CpuAttention(pool, num_heads=model.config.num_heads, specs=model.attention).plan(batch)
    assert isinstance(model.fused.step_of(plan, 4), SmallStep)
    assert isinstance(model.fused.step_of(plan, 4, adapters_of(model, batch, 0, NO_ADAPTER, 1, 0)), LargeStep)
