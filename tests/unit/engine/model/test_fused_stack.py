"""Compiled steps compute what the layers one by one do, for the models that they cover."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tandem_engine.config import Activation, ModelConfig, MoeConfig, NormKind, NormPlacement, QkNorm, RopeConfig
from tandem_engine.forward.batch import ForwardBatch
from tandem_engine.kernels.cpu.attention_work import CHUNK
from tandem_engine.memory.pool import KvPool
from tandem_engine.model.attention.backend import NotifyingPlan
from tandem_engine.model.attention.cpu import SHORT_EXTEND, CpuAttention
from tandem_engine.model.cpu import arrays, step
from tandem_engine.model.cpu.step import FEW_TOKENS, LargeStep, SmallStep
from tandem_engine.model.decoder import Decoder, build_decoder
from tandem_engine.model.layers import linear
from tandem_engine.model.layers.linear import Embedding, PanelTable
from tandem_engine.model.tensor_names import EMBEDDING
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


def assert_same(model: Decoder, page_size: int, sequences: Sequence[Seq], *, kind: type = SmallStep) -> None:
    """In hidden states and in what is written to pages. bfloat16 rounds most of what order makes of a sum away."""
    dtype = model.norm.weight.dtype
    batch = make_batch(with_ids(sequences), page_size=page_size)
    pools = [filled_pool(model.config, page_size, dtype) for _ in range(2)]
    assert type(step_of(model, pools[0], batch)) is kind
    compiled = compute(model, pools[0], batch)
    by_layers = compute(replace(model, fused=None), pools[1], batch)
    apart = {"atol": 5e-5, "rtol": 1e-5} if dtype is torch.float32 else {"atol": 2**-6, "rtol": 2**-6}
    torch.testing.assert_close(compiled, by_layers, **apart)
    torch.testing.assert_close(pools[0].data, pools[1].data, **apart)
    if dtype is torch.bfloat16:
        assert (compiled == by_layers).float().mean() > 0.9


def step_of(model: Decoder, pool: KvPool, batch: ForwardBatch) -> SmallStep | LargeStep | None:
    attention = CpuAttention(pool, num_heads=model.config.num_heads, specs=model.attention)
    assert model.fused is not None
    return model.fused.step_of(attention.plan(batch), batch.num_tokens)


def dealer_of(model: Decoder, page_size: int = 16) -> PageDealer:
    return PageDealer(pool=filled_pool(model.config, page_size))


DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"qk_norm": QkNorm.HEADS},
        BIASED,
        {"num_kv_heads": 4},
        {"num_kv_heads": 1},
        {"num_heads": 6, "num_kv_heads": 2, "head_dim": 32, "qk_norm": QkNorm.HEADS},
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
    prompt = [dealer.seq(41, 41), dealer.seq(90, 50), dealer.decode(20)]
    assert_same(model, page_size, prompt, kind=LargeStep)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fields", [{"qk_norm": QkNorm.HEADS, **BIASED}, {"hidden_size": 72, "intermediate_size": 34}])
def test_sizes_and_dtypes_of_all_kinds_compute_the_same(fields, dtype):
    model = build(small_config(**fields), dtype)
    dealer = dealer_of(model)
    assert_same(model, 16, [dealer.decode(length) for length in (1, 2, 16, 17, 40, 65)])
    assert_same(model, 16, [dealer.seq(41, 41), dealer.seq(90, 50), dealer.decode(20)], kind=LargeStep)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13, 31, FEW_TOKENS])
def test_every_size_of_batch_computes_the_same(count):
    model = build(small_config(qk_norm=QkNorm.HEADS))
    dealer = dealer_of(model)
    assert_same(model, 16, [dealer.decode(1 + number % 20) for number in range(count)])


@pytest.mark.parametrize("length", [CHUNK, CHUNK + 1, 2 * CHUNK + 77])
def test_long_context_computes_the_same(length):
    model = build(small_config())
    dealer = dealer_of(model)
    assert_same(model, 16, [dealer.decode(length), dealer.decode(3)])


def test_tokens_on_a_cached_prefix_compute_the_same():
    model = build(small_config())
    dealer = dealer_of(model)
    assert_same(model, 16, [dealer.seq(40 + SHORT_EXTEND, SHORT_EXTEND), dealer.seq(33, 2), dealer.decode(20)])


def test_sequence_has_the_same_bits_in_any_batch():
    model = build(small_config(qk_norm=QkNorm.HEADS))
    dealer = dealer_of(model)
    sequences = with_ids([dealer.decode(length) for length in (5, 40, 17, 64, 33, 2, 9, 21, 50)])
    together = compute(model, filled_pool(model.config), make_batch(sequences))
    alone = [compute(model, filled_pool(model.config), make_batch([seq])) for seq in sequences]
    assert torch.equal(together, torch.cat(alone))


def test_selected_tokens_are_in_requested_order():
    model = build(small_config())
    dealer = dealer_of(model)
    batch = make_batch(with_ids([dealer.decode(length) for length in (5, 40, 17)]))
    everything = compute(model, filled_pool(model.config), batch)
    for wanted in ([2, 0], [1], []):
        some = compute(model, filled_pool(model.config), batch, torch.tensor(wanted, dtype=torch.int64))
        assert torch.equal(some, everything[wanted])


@pytest.mark.parametrize("gate", [-200.0, -90.0, 90.0, 200.0])
def test_gate_of_any_size_computes_the_same(gate):
    model = build(small_config(**BIASED))
    for block in model.blocks:
        # The kernels read the same memory.
        block.feed_forward.gate_up.bias[: model.config.intermediate_size] = gate
    dealer = dealer_of(model)
    assert_same(model, 16, [dealer.decode(7)])
    assert_same(model, 16, [dealer.seq(40, 40)], kind=LargeStep)


@pytest.mark.parametrize(("ids", "positions"), [([-1], [4]), ([96], [4]), ([3], [2048]), ([3], [-1])])
def test_index_outside_of_a_table_is_rejected(ids, positions):
    model = build(small_config())
    dealer = dealer_of(model)
    for batch in (make_batch([dealer.decode(5)]), make_batch([dealer.seq(40, 40)])):
        tokens = batch.num_tokens
        wrong = replace(
            batch, input_ids=torch.tensor(ids).expand(tokens), positions=torch.tensor(positions).expand(tokens)
        )
        with pytest.raises(IndexError):
            compute(model, filled_pool(model.config), wrong)


@pytest.mark.parametrize(
    "fields",
    [
        {"norm": NormKind.UNIT_OFFSET},
        {"norm_placement": NormPlacement.AROUND},
        {"activation": Activation.GELU_TANH},
        {"attention_soft_cap": 20.0},
        {"embedding_scale": 2.0},
        {"windows": (None, 24)},
        {"second_rope": RopeConfig(theta=500.0), "second_layers": (1,)},
        {"moe": MoeConfig(num_experts=2, experts_per_token=1, intermediate_size=32, normalize=True)},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_model_with_anything_else_keeps_its_layers(fields):
    assert build(small_config(**fields)).fused is None


@pytest.mark.parametrize(
    ("fields", "dtype"), [({}, torch.float16), ({"intermediate_size": 33}, torch.bfloat16)], ids=["float16", "odd"]
)
def test_model_of_other_numbers_keeps_its_layers(fields, dtype):
    assert build(small_config(**fields), dtype).fused is None


def test_fused_stack_is_disabled_if_weight_copies_exceed_limit(monkeypatch):
    monkeypatch.setattr(arrays, "MAX_COPIED_BYTES", 4 * 2 * (64 * 128 + 64 * 64 + 64 * 192 + 64 * 96))
    assert build(small_config()).fused is not None
    monkeypatch.setattr(arrays, "MAX_COPIED_BYTES", arrays.MAX_COPIED_BYTES - 1)
    assert build(small_config()).fused is None


def test_weights_in_panels_are_not_copied(monkeypatch):
    monkeypatch.setattr(arrays, "MAX_COPIED_BYTES", 0)
    model = build(small_config(hidden_size=512, intermediate_size=256, num_heads=8, num_kv_heads=4, head_dim=32))
    if getattr(model.blocks[0].attention.qkv, "few", None) is None:
        pytest.skip("oneDNN keeps weights otherwise on this CPU")
    dealer = dealer_of(model)
    assert_same(model, 16, [dealer.decode(length) for length in (5, 40, 17)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_tied_table_is_read_from_the_panels_of_the_scores(dtype, monkeypatch):
    monkeypatch.setattr(linear, "MIN_SHARED_BYTES", 0)
    config = small_config(hidden_size=512, num_heads=8, num_kv_heads=4, head_dim=32, vocab_size=200)
    model = build(config, dtype)
    assert isinstance(model.embedding, Embedding)
    if not isinstance(model.embedding.table, PanelTable):
        pytest.skip("oneDNN keeps weights otherwise on this CPU")
    stored = RandomWeights(config=config, dtype=dtype).stacked(EMBEDDING)
    assert torch.equal(model.embedding(torch.arange(200)), stored)
    dealer = dealer_of(model)
    assert_same(model, 16, [dealer.decode(length) for length in (5, 40, 17)])
    assert_same(model, 16, [dealer.seq(41, 41), dealer.decode(20)], kind=LargeStep)
    for sequence in (dealer.decode(5), dealer.seq(40, 40)):
        batch = make_batch([sequence])
        beyond = replace(batch, input_ids=torch.full((batch.num_tokens,), 200))
        with pytest.raises(IndexError):
            compute(model, filled_pool(config, dtype=dtype), beyond)


class Arriving:
    """A kernel that is there at the look number `after`, counted from 0."""

    def __init__(self, kernel, after: int) -> None:
        self._kernel, self._left = kernel, after

    def get(self):
        self._left -= 1
        return None if self._left >= 0 else self._kernel


def test_small_steps_are_large_until_their_kernel_is_there():
    model = build(small_config())
    assert model.fused is not None
    kernel = model.fused.kernel.get()
    dealer = dealer_of(model)
    decodes = [dealer.decode(length) for length in (2, 17, 40)]
    late = replace(model, fused=replace(model.fused, kernel=Arriving(kernel, after=2)))
    assert_same(late, 16, decodes, kind=LargeStep)
    assert_same(late, 16, decodes)


def test_prompt_takes_a_large_step():
    model = build(small_config())
    dealer, pool = dealer_of(model), filled_pool(model.config)
    assert isinstance(step_of(model, pool, make_batch([dealer.seq(20, 20), dealer.decode(4)])), LargeStep)
    assert isinstance(step_of(model, pool, make_batch([dealer.seq(40, SHORT_EXTEND + 1)])), LargeStep)


def test_pages_of_another_dtype_take_the_layers_one_by_one():
    model = build(small_config())
    batch = make_batch([dealer_of(model).decode(4)])
    assert step_of(model, filled_pool(model.config, dtype=torch.bfloat16), batch) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_number_of_threads_computes_the_same_bits(dtype, monkeypatch):
    monkeypatch.setattr(step, "PARALLEL_BYTES", 0)
    model = build(small_config(qk_norm=QkNorm.HEADS, num_layers=3), dtype)
    dealer = dealer_of(model)
    batches = [
        make_batch(with_ids([dealer.decode(length) for length in (5, 2 * CHUNK + 9, 17)])),
        make_batch(with_ids([dealer.decode(33)])),
        make_batch(with_ids([dealer.seq(100, 70), dealer.decode(9)])),
    ]
    for batch in batches:
        results = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            pool = filled_pool(model.config, dtype=dtype)
            results.append((compute(model, pool, batch), pool.data))
        for hidden, data in results[1:]:
            assert torch.equal(hidden, results[0][0])
            assert torch.equal(data, results[0][1])


def test_fused_stack_reports_each_layer_once_kv_is_written():
    model = build(small_config(num_layers=3))
    dealer, pool = dealer_of(model), filled_pool(model.config)
    before = pool.data.clone()
    batch = make_batch(with_ids([dealer.seq(20, 20)]))
    reported: list[tuple[int, list[bool]]] = []

    def wrote(layer: int) -> None:
        reported.append((layer, [bool((pool.data[:, each] != before[:, each]).any()) for each in range(3)]))

    attention = CpuAttention(pool, num_heads=model.config.num_heads, specs=model.attention)
    with torch.inference_mode():
        plan = NotifyingPlan(plan=attention.plan(batch), wrote=wrote)
        model.forward(batch.input_ids, batch.positions, plan, torch.tensor([19]))
    assert reported == [(0, [True, False, False]), (1, [True, True, False]), (2, [True, True, True])]


def test_fused_stack_requires_cpu_attention_plan():
    model = build(small_config())
    assert model.fused is not None
    assert model.fused.step_of(DenseAttend(specs=model.attention, extend_lens=[1]), 1) is None


def test_many_tokens_take_a_large_step():
    model = build(small_config())
    dealer, pool = dealer_of(model), filled_pool(model.config)
    few, many = (make_batch([dealer.decode(2) for _ in range(count)]) for count in (FEW_TOKENS, FEW_TOKENS + 1))
    assert isinstance(step_of(model, pool, few), SmallStep)
    assert isinstance(step_of(model, pool, many), LargeStep)
    assert_same(model, 16, [dealer.decode(2 + number % 7) for number in range(FEW_TOKENS + 9)], kind=LargeStep)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [33, 34, 64, 129, 160])
def test_rows_that_pad_a_large_step_change_no_token(count, dtype):
    model = build(small_config(qk_norm=QkNorm.HEADS, **BIASED), dtype)
    dealer = dealer_of(model)
    assert_same(model, 16, [dealer.seq(count - 2, count - 2), dealer.decode(5), dealer.decode(20)], kind=LargeStep)


def test_selected_tokens_of_large_step_are_in_requested_order():
    model = build(small_config())
    batch = make_batch(with_ids([dealer_of(model).seq(80, 80)]))
    everything = compute(model, filled_pool(model.config), batch)
    for wanted in (list(range(79, 20, -1)), [40], []):
        some = compute(model, filled_pool(model.config), batch, torch.tensor(wanted, dtype=torch.int64))
        torch.testing.assert_close(some, everything[wanted], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 5, 36, 64])
def test_selection_of_more_tokens_than_step_has(count, dtype):
    """A token that is sampled after may be pooled, too. What a large step's gate gave was written behind its memory."""
    model = build(small_config(), dtype)
    batch = make_batch(with_ids([dealer_of(model).seq(count, count)]))
    everything = compute(model, filled_pool(model.config, dtype=dtype), batch)
    wanted = [count - 1, *range(count)]
    more = compute(model, filled_pool(model.config, dtype=dtype), batch, torch.tensor(wanted))
    apart = {"atol": 1e-5, "rtol": 1e-5} if dtype is torch.float32 else {"atol": 2**-6, "rtol": 2**-6}
    torch.testing.assert_close(more, everything[wanted], **apart)
