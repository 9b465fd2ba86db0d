"""Experts of kernels equal those of a CPU, and so do decoders that are made of kernels throughout."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from tandem_engine.config import (
    Activation,
    ModelConfig,
    MoeConfig,
    NormKind,
    NormPlacement,
    QkNorm,
    QueryScale,
    RopeConfig,
    Scoring,
    SharedExpert,
)
from tandem_engine.kernels.triton import expert_blocks, expert_tiles, fused_moe
from tandem_engine.kernels.triton.expert_tiles import ExpertTiles
from tandem_engine.kernels.triton.norm_activation import product_constants
from tandem_engine.memory.pool import KvPool
from tandem_engine.model import decoder
from tandem_engine.model.attention.reference import TorchReferenceBackend
from tandem_engine.model.cpu import step
from tandem_engine.model.layers import mlp as cpu_activation
from tandem_engine.model.layers.linear import Linear
from tandem_engine.model.layers.mlp import Choice, Expert, SparseFeedForward
from tandem_engine.model.rotary_fields import NO_ROTATION
from tandem_testing.forward_builders import Seq, make_batch
from tandem_testing.random_weights import RandomWeights, small_config
from tandem_testing.triton_kernels.ahead_of_time import SHARED_LIMIT, Compiled, compile_kernel
from tandem_testing.triton_kernels.checks import AMPERE, HOPPER
from tandem_testing.triton_kernels.tensors import kernels_on, random_floats, to_device, units_apart

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16


def check_alignment_of_experts(device: str) -> None:
    """Stable, padded to whole blocks, every pair once, for any distribution of the choices."""
    draws = torch.Generator().manual_seed(3)
    cases = [torch.randint(0, 6, (tokens, 2), generator=draws) for tokens in (1, 40, 150)]
    for experts in (*cases, torch.full((70, 2), 5)):
        for rows in (64, 16):
            alignment_agrees(device, experts, rows)


def alignment_agrees(device: str, experts: Tensor, rows: int) -> None:
    """Of `experts` [T, k] below 6, in blocks of `rows`."""
    pairs, owner, _ = expert_blocks.align(experts.to(device), 6, rows)
    flat, blocks = experts.flatten(), pairs.cpu().view(-1, rows)
    expected = []
    for expert in range(6):
        chose = (flat == expert).nonzero().squeeze(1).int()
        padded = torch.cat((chose, torch.full((-len(chose) % rows,), len(flat), dtype=torch.int32)))
        expected += [(expert, block.tolist()) for block in padded.view(-1, rows)]
    owners = owner.cpu().tolist()
    found = [(o, block.tolist()) for o, block in zip(owners, blocks, strict=True) if o >= 0]
    assert found == expected
    assert owners[len(expected) :] == [-1] * (len(owners) - len(expected))


def check_fused_experts(device: str) -> None:
    for dtype, name in ((FLOAT32, "silu"), (BFLOAT16, "silu"), (BFLOAT16, "gelu_tanh")):
        experts_agree(device, dtype, name, tokens=5, hidden=72, inner=24, experts=4, chosen=2)


def check_experts_of_a_token_do_not_depend_on_the_others(device: str) -> None:
    x, choice, gate_up, down = experts_of(BFLOAT16, device, tokens=4, hidden=24, inner=16, experts=3, chosen=2)
    together = fused_moe.fused_experts(x, *choice, gate_up, down, activation="silu")
    alone = fused_moe.fused_experts(
        x[2:3], choice.experts[2:3], choice.weights[2:3], gate_up, down, activation="silu"
    )  # fmt: skip
    assert torch.equal(together[2:3], alone)


def check_every_tile_agrees_with_the_layer(device: str) -> None:
    """Sizes that no tile divides."""
    for tiles in every_tile():
        experts_agree(
            device, BFLOAT16, "silu", tokens=5, hidden=72, inner=40, experts=4, chosen=2, tiles=tiles
        )  # fmt: skip


def check_tiles_change_no_bit(device: str) -> None:
    """A token alone, by the tile for few, has the result that it has in a prompt, by that for many."""
    x, choice, gate_up, down = experts_of(BFLOAT16, device, tokens=150, hidden=192, inner=144, experts=2, chosen=2)
    results = [
        fused_moe.fused_experts(x, *choice, gate_up, down, activation="silu", tiles=tiles) for tiles in every_tile()
    ]
    for result in results[1:]:
        assert torch.equal(result, results[0])


def every_tile() -> tuple[ExpertTiles, ...]:
    """Of Hopper."""
    return expert_tiles.every_tile(BFLOAT16, shared_bytes=SHARED_LIMIT[HOPPER])


def check_decoders_of_kernels_are_those_of_layers(device: str) -> None:
    """Every kernel where the model calls it: norms in all places, gates, rotations, experts."""
    small = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 24, "head_dim": 8, "max_position": 64}
    gemma = {"norm": NormKind.UNIT_OFFSET, "norm_placement": NormPlacement.AROUND, "activation": Activation.GELU_TANH}
    experts = MoeConfig(num_experts=4, experts_per_token=2, intermediate_size=16, normalize=True, dense_layers=(0,))
    halves = {"rope": RopeConfig(rotary_dim=4, interleaved=True), "qk_norm": QkNorm.WHOLE, "logit_scale": 0.5}
    after = halves | {"norm": NormKind.ROUND_LAST, "norm_placement": NormPlacement.AFTER}
    parallel = {"norm": NormKind.CENTERED, "norm_placement": NormPlacement.SHARED, "second_rope": NO_ROTATION}
    shared = replace(
        experts,
        scoring=Scoring.SIGMOID,
        choice_bias=True,
        groups=2,
        scale=1.5,
        float32_router=True,
        shared=SharedExpert(intermediate_size=16, gated=True),
    )
    late = {"qk_norm": QkNorm.ROTATED_HEADS, "query_scale": QueryScale(beta=0.4, period=3), "moe": shared}
    plain = ({"qk_norm": QkNorm.HEADS}, gemma | {"embedding_scale": 32**0.5}, {"moe": experts})
    for fields in (*plain, after, parallel | {"second_layers": (1,), "residual_scale": 0.7}, late):
        config = small_config(**small, **fields)
        with layers_alone():
            expected, stored = logits_of(config, "cpu")
        with layers_by_kernels(device):
            found, written = logits_of(config, device)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(written, stored, rtol=1e-4, atol=1e-4)
        assert torch.equal(found.argmax(dim=1), expected.argmax(dim=1))


@contextmanager
def layers_alone() -> Iterator[None]:
    """Have decoders run their layers, without a compiled call in their place: that takes 20 s to compile for each size
    of heads."""
    fuse = step.fuse
    step.fuse = lambda *_, **__: None
    try:
        yield
    finally:
        step.fuse = fuse


@contextmanager
def layers_by_kernels(device: str) -> Iterator[None]:
    """Have layers that are built for `device` be kernels."""
    with layers_alone(), kernels_on(device):
        yield


def logits_of(config: ModelConfig, device: str) -> tuple[Tensor, Tensor]:
    """See `logits_through`; of random weights."""
    weights = RandomWeights(config=config, device=torch.device(device))
    return logits_through(decoder.build_decoder(config, weights, positions=config.max_position), device)


def logits_through(model: decoder.Decoder, device: str) -> tuple[Tensor, Tensor]:
    """Of the last tokens of a prompt and of a decode behind it, and all KV that they wrote."""
    config = model.config
    pool = KvPool(
        num_pages=4, num_layers=config.num_layers, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim,
        page_size=4, dtype=FLOAT32, device=device,
    )  # fmt: skip
    backend = TorchReferenceBackend(pool, specs=model.attention)
    logits = []
    for seq in (
        Seq(seq_len=6, extend_len=6, pages=[3, 1], input_ids=[3, 9, 4, 9, 13, 7]),
        Seq(seq_len=7, decode=True, pages=[3, 1], input_ids=[11]),
    ):
        batch = to_device(make_batch([seq], page_size=4), device)
        wanted = torch.tensor([batch.num_tokens - 1], device=device)
        hidden = model.forward(batch.input_ids, batch.positions, backend.plan(batch), wanted)
        logits.append(model.logits(hidden).cpu())
    return torch.cat(logits), pool.data.cpu()


def experts_of(
    dtype: torch.dtype, device: str, *, tokens: int, hidden: int, inner: int, experts: int, chosen: int
) -> tuple[Tensor, Choice, Tensor, Tensor]:
    """x, the selection, and the experts' weights."""
    scores = random_floats(tokens, experts, seed=12, dtype=FLOAT32, device=device).softmax(dim=1)
    weights, ids = scores.topk(chosen, dim=1)
    x = random_floats(tokens, hidden, seed=13, dtype=dtype, device=device)
    gate_up = random_floats(experts, 2 * inner, hidden, seed=14, dtype=dtype, device=device, scale=hidden**-0.5)
    down = random_floats(experts, hidden, inner, seed=15, dtype=dtype, device=device, scale=inner**-0.5)
    return x, Choice(ids, weights.to(dtype)), gate_up, down


def experts_agree(
    device: str, dtype: torch.dtype, name: str, *, tiles: ExpertTiles | None = None, **sizes: int
) -> None:
    """Within rounding of the layer that computes expert after expert."""
    x, choice, gate_up, down = experts_of(dtype, device, **sizes)
    reference = {"silu": cpu_activation.silu_and_multiply, "gelu_tanh": cpu_activation.gelu_tanh_and_multiply}[name]
    layer = SparseFeedForward(
        norm=lambda hidden: hidden,
        router=lambda _: choice,
        experts=tuple(
            Expert(gate_up=Linear(weight=gate_up[e], bias=None), down=Linear(weight=down[e], bias=None))
            for e in range(sizes["experts"])
        ),
        activation=reference,
    )
    found = fused_moe.fused_experts(x, *choice, gate_up, down, activation=name, tiles=tiles)
    assert units_apart(found, layer(x), at_least=0.25) <= (4.0 if dtype is BFLOAT16 else 64.0)


def compile_alignment_and_sums_of_experts(arch: int) -> None:
    """Of Qwen3-30B-A3B: 128 of 768 on 2048, 8 for a token."""
    counting = {"experts": "*i64:16", "counts": "*i32:16", "num_pairs": "i32"}
    placing = counting | {"pairs": "*i32:16", "owner": "*i32:16", "num_blocks": "i32"}
    blocks = {"BLOCK": expert_blocks.BLOCK_PAIRS}
    compile_kernel(expert_blocks.count_kernel, counting, blocks, arch=arch).assert_fits()
    for rows in (64, 128):
        table = {"EXPERTS": 128, "WIDTH": 128, "ROWS": rows} | blocks
        compile_kernel(expert_blocks.place_kernel, placing, table, arch=arch).assert_fits()
    combining = dict.fromkeys(("results", "weights", "out"), "*bf16:16")
    shape = {"CHOSEN": 8, "SIZE": 2048, "BLOCK": expert_blocks.COMBINE}
    compile_kernel(expert_blocks.combine_kernel, combining, shape, arch=arch, enable_fp_fusion=False).assert_fits()


RESIDENT = {expert_tiles.FEW: 3, expert_tiles.SOME: 3, expert_tiles.MANY: 1}
"""Programs of each tile that a multiprocessor of Hopper runs at once, at least: with few pairs, loads of all of them
are in flight together."""


def compile_every_tile_of_experts() -> None:
    """Of Qwen3-30B-A3B: nothing spills, weights are loaded ahead, 16 bytes at a time, and warp groups multiply."""
    for tiles, resident in RESIDENT.items():
        for built in tile_compiled(tiles, arch=HOPPER):
            assert built.resident() >= resident, f"{built.what}: {built.resident()} run at once"
            assert "HGMMA" in built.instructions(), built.what
            built.assert_pipelined(buffers=2)
            built.assert_wide_copies()


def compile_experts_for_smaller_devices() -> None:
    for built in tile_compiled(expert_tiles.SOME, arch=AMPERE):
        assert "mma.sync" in built.ptx, built.what


def tile_compiled(tiles: ExpertTiles, *, arch: int) -> Iterator[Compiled]:
    """Both products, which fit."""
    rows = {"pairs": "*i32:16", "owner": "*i32:16", "num_pairs": "i32"}
    gate = product_constants("silu", None)
    for kernel, tensors, shape, tile in (
        (
            fused_moe.gate_up_kernel,
            ("x", "weight", "inner"),
            fused_moe.gate_up_shape(8, 768, 2048, gate),
            tiles.gate_up,
        ),
        (fused_moe.down_kernel, ("inner", "weight", "results"), fused_moe.down_shape(2048, 768), tiles.down),
    ):
        built = compile_kernel(
            kernel, dict.fromkeys(tensors, "*bf16:16") | rows,
            {"bias": None, **shape, **fused_moe.tile_constants(tiles.rows, tile)},
            arch=arch, num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
        built.assert_fits()
        yield built
