"""One call computes what the layers one by one do, for the models and steps that it covers."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tandem_engine.attention.cpu import SHORT_EXTEND, CpuAttention
from tandem_engine.attention.cpu_kernels import CHUNK
from tandem_engine.attention.vectors import PANEL
from tandem_engine.config import Activation, ModelConfig, MoeConfig, NormKind, RopeConfig
from tandem_engine.forward.forward_batch import ForwardBatch
from tandem_engine.memory.pool import KvPool
from tandem_engine.model.decoder import Decoder, build_decoder
from tandem_engine.model.fused import stack
from tandem_engine.model.fused.stack import FEW_TOKENS, FusedHead
from tandem_testing.dense_attention import DenseAttend
from tandem_testing.forward_builders import PageDealer, Seq, make_batch
from tandem_testing.random_weights import RandomWeights, small_config

BIASED = {"attention_bias": True, "output_bias": True, "mlp_bias": True}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Decoder:
    return build_decoder(config, RandomWeights(config=config, dtype=dtype), positions=config.max_position)


def filled_pool(config: ModelConfig, page_size: int = 16, dtype: torch.dtype = torch.float32) -> KvPool:
    pool = KvPool(
        num_pages=2 + 3000 // page_size,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=page_size,
        dtype=dtype,
        device="cpu",
    )
    pool.data.copy_(torch.randn(pool.data.shape, generator=torch.Generator().manual_seed(1)))
    return pool


def with_ids(sequences: Sequence[Seq]) -> list[Seq]:
    return [
        replace(seq, input_ids=[(7 * number + 3 * i) % 96 for i in range(seq.extend_len)])
        for number, seq in enumerate(sequences)
    ]


def compute(model: Decoder, pool: KvPool, batch: ForwardBatch, wanted: torch.Tensor | None = None) -> torch.Tensor:
    attention = CpuAttention(pool, num_heads=model.config.num_heads, specs=model.attention)
    everything = torch.arange(batch.num_tokens) if wanted is None else wanted
    with torch.inference_mode():
        return model.forward(batch.input_ids, batch.positions, attention.plan(batch), everything)


def assert_same(model: Decoder, page_size: int, sequences: Sequence[Seq]) -> None:
    """In hidden states and in what is written to pages."""
    batch = make_batch(with_ids(sequences), page_size=page_size)
    pools = [filled_pool(model.config, page_size) for _ in range(2)]
    assert is_fused(model, pools[0], batch)
    one_call = compute(model, pools[0], batch)
    by_layers = compute(replace(model, fused=None), pools[1], batch)
    torch.testing.assert_close(one_call, by_layers, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(pools[0].data, pools[1].data, atol=1e-5, rtol=1e-5)


def is_fused(model: Decoder, pool: KvPool, batch: ForwardBatch) -> bool:
    attention = CpuAttention(pool, num_heads=model.config.num_heads, specs=model.attention)
    return model.fused is not None and model.fused.step_of(attention.plan(batch), batch.num_tokens) is not None


def dealer_of(model: Decoder, page_size: int = 16) -> PageDealer:
    return PageDealer(pool=filled_pool(model.config, page_size))


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"qk_norm": True},
        BIASED,
        {"num_kv_heads": 4},
        {"num_kv_heads": 1},
        {"num_heads": 6, "num_kv_heads": 2, "head_dim": 32, "qk_norm": True},
        {"hidden_size": 32, "intermediate_size": 32, "head_dim": 64, "num_layers": 3},
        {"attention_scale": 0.5},
        {"windows": (24, 24)},
        {"rope": RopeConfig(theta=500.0)},
    ],
    ids=lambda fields: ",".join(f"{name}={value}" for name, value in fields.items()) or "plain",
)
def test_every_kind_of_model_computes_the_same(fields, page_size):
    model = build(small_config(**fields))
    dealer = dealer_of(model, page_size)
    assert_same(model, page_size, [dealer.decode(length) for length in (1, 2, 16, 17, 40, 65)])


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13, 31, 70])
def test_every_size_of_batch_computes_the_same(count):
    model = build(small_config(qk_norm=True))
    dealer = dealer_of(model)
    assert_same(model, 16, [dealer.decode(1 + number % 20) for number in range(count)])


@pytest.mark.parametrize("length", [CHUNK, CHUNK + 1, 2 * CHUNK + 77])
def test_a_long_context_computes_the_same(length):
    model = build(small_config())
    dealer = dealer_of(model)
    assert_same(model, 16, [dealer.decode(length), dealer.decode(3)])


def test_tokens_on_a_cached_prefix_compute_the_same():
    model = build(small_config())
    dealer = dealer_of(model)
    assert_same(model, 16, [dealer.seq(40 + SHORT_EXTEND, SHORT_EXTEND), dealer.seq(33, 2), dealer.decode(20)])


def test_a_sequence_has_the_same_bits_in_any_batch():
    model = build(small_config(qk_norm=True))
    dealer = dealer_of(model)
    sequences = with_ids([dealer.decode(length) for length in (5, 40, 17, 64, 33, 2, 9, 21, 50)])
    together = compute(model, filled_pool(model.config), make_batch(sequences))
    alone = [compute(model, filled_pool(model.config), make_batch([seq])) for seq in sequences]
    assert torch.equal(together, torch.cat(alone))


def test_wanted_tokens_come_in_the_order_asked_for():
    model = build(small_config())
    dealer = dealer_of(model)
    batch = make_batch(with_ids([dealer.decode(length) for length in (5, 40, 17)]))
    everything = compute(model, filled_pool(model.config), batch)
    for wanted in ([2, 0], [1], []):
        some = compute(model, filled_pool(model.config), batch, torch.tensor(wanted, dtype=torch.int64))
        assert torch.equal(some, everything[wanted])


@pytest.mark.parametrize("gate", [-200.0, -90.0, 90.0, 200.0])
def test_a_gate_of_any_size_neither_overflows_nor_lingers(gate):
    model = build(small_config(**BIASED))
    assert model.fused is not None
    for block, bias in zip(model.blocks, model.fused.arrays.gate_up_bias, strict=True):
        block.feed_forward.gate_up.bias[: model.config.intermediate_size] = gate
        bias[: model.config.intermediate_size] = gate
    assert_same(model, 16, [dealer_of(model).decode(7)])


@pytest.mark.parametrize(("ids", "positions"), [([-1], [4]), ([96], [4]), ([3], [2048]), ([3], [-1])])
def test_what_lies_outside_of_a_table_is_refused(ids, positions):
    model = build(small_config())
    batch = make_batch([dealer_of(model).decode(5)])
    wrong = replace(batch, input_ids=torch.tensor(ids), positions=torch.tensor(positions))
    with pytest.raises(IndexError):
        compute(model, filled_pool(model.config), wrong)


@pytest.mark.parametrize(
    "fields",
    [
        {"norm": NormKind.UNIT_OFFSET},
        {"sandwich_norms": True},
        {"activation": Activation.GELU_TANH},
        {"attention_soft_cap": 20.0},
        {"embedding_scale": 2.0},
        {"windows": (None, 24)},
        {"local_rope": RopeConfig(theta=500.0), "local_layers": (1,)},
        {"moe": MoeConfig(num_experts=2, experts_per_token=1, intermediate_size=32, normalise=True)},
        {"hidden_size": PANEL + 8},
        {"intermediate_size": PANEL // 2 + 1},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_model_with_anything_else_keeps_its_layers(fields):
    assert build(small_config(**fields)).fused is None


def test_a_model_of_another_dtype_keeps_its_layers():
    assert build(small_config(), torch.bfloat16).fused is None


def test_a_large_model_keeps_its_layers(monkeypatch):
    monkeypatch.setattr(stack, "MAX_WEIGHT_BYTES", 4 * 2 * (64 * 128 + 64 * 64 + 64 * 192 + 64 * 96))
    assert build(small_config()).fused is not None
    monkeypatch.setattr(stack, "MAX_WEIGHT_BYTES", stack.MAX_WEIGHT_BYTES - 1)
    assert build(small_config()).fused is None


def test_a_prompt_takes_the_layers_one_by_one():
    model = build(small_config())
    dealer, pool = dealer_of(model), filled_pool(model.config)
    assert not is_fused(model, pool, make_batch([dealer.seq(20, 20), dealer.decode(4)]))
    assert not is_fused(model, pool, make_batch([dealer.seq(40, SHORT_EXTEND + 1)]))


def test_attention_that_is_not_planned_for_a_cpu_takes_the_layers_one_by_one():
    model = build(small_config())
    assert model.fused is not None
    assert model.fused.step_of(DenseAttend(specs=model.attention, extend_lens=[1]), 1) is None


def test_many_tokens_take_all_threads_where_there_are_several():
    model = build(small_config())
    dealer, pool = dealer_of(model), filled_pool(model.config)
    few, many = (make_batch([dealer.decode(2) for _ in range(count)]) for count in (FEW_TOKENS, FEW_TOKENS + 1))
    assert is_fused(model, pool, many)
    torch.set_num_threads(2)
    assert is_fused(model, pool, few)
    assert not is_fused(model, pool, many)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 9, FEW_TOKENS, FEW_TOKENS + 1])
def test_logits_are_those_of_the_plain_head(rows, tied):
    model = build(small_config(tie_embeddings=tied))
    assert isinstance(model.lm_head, FusedHead)
    hidden = torch.randn(rows, model.config.hidden_size)
    torch.testing.assert_close(model.logits(hidden), model.lm_head.many(hidden), atol=1e-5, rtol=0)


def test_a_vocabulary_of_no_whole_panels_keeps_its_head():
    model = build(small_config(vocab_size=97))
    assert model.fused is not None
    assert not isinstance(model.lm_head, FusedHead)
