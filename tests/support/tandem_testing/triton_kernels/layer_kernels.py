"""Norms, rotations, stores and activations of kernels equal the layers of a CPU."""

from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tandem_engine.config import NormKind
from tandem_engine.kernels.interface import HeadNorm, HeadTurn
from tandem_engine.kernels.triton import norm_activation, rope_store, store_kv
from tandem_engine.memory.pool import KvPool
from tandem_engine.model.layers import mlp as cpu_activation
from tandem_engine.model.layers import norm as cpu_norm
from tandem_engine.model.layers.attention import Rotation
from tandem_testing.triton_kernels.ahead_of_time import compile_kernel
from tandem_testing.triton_kernels.checks import HOPPER
from tandem_testing.triton_kernels.tensors import random_floats, units_apart

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
EPS = 1e-6
EDGES = 64
"""Size of heads for numbers between those of float8: the fewer tokens, the less the interpreter has to do."""
POINTERS = {FLOAT32: "*fp32:16", BFLOAT16: "*bf16:16"}


@dataclass(frozen=True, kw_only=True)
class Heads:
    """A model's attention heads, and how many tokens a step has."""

    tokens: int
    query: int
    kv: int
    size: int
    rotary: int
    page: int


RMS_KINDS = tuple(kind for kind in NormKind if kind is not NormKind.CENTERED)
"""Those that this kernel computes."""


def check_rms_norm(device: str) -> None:
    for dtype, kind, size in product((FLOAT32, BFLOAT16), RMS_KINDS, (1, 24, 100, 5000)):
        norm_agrees(device, dtype, kind, tokens=3, size=size)


def check_rms_norm_of_heads(device: str) -> None:
    for dtype, kind in product((FLOAT32, BFLOAT16), RMS_KINDS):
        head_norm_agrees(device, dtype, kind, tokens=5, heads=3, size=24)


def check_norms_of_a_token_do_not_depend_on_the_others(device: str) -> None:
    x = random_floats(9, 40, seed=1, dtype=BFLOAT16, device=device)
    weight = random_floats(40, seed=2, dtype=BFLOAT16, device=device)
    together = norm_activation.rms_norm(x, weight, eps=EPS)
    assert all(
        torch.equal(together[i], norm_activation.rms_norm(x[i : i + 1], weight, eps=EPS)[0]) for i in range(len(x))
    )
    x[4, 7] = torch.nan
    disturbed = norm_activation.rms_norm(x, weight, eps=EPS)
    assert disturbed[4].isnan().all()
    others = torch.arange(9, device=device) != 4
    assert torch.equal(disturbed[others], together[others])


def check_nothing_is_launched_for_no_tokens(device: str) -> None:
    none = torch.empty(0, 8, dtype=BFLOAT16, device=device)
    weight = torch.ones(8, dtype=BFLOAT16, device=device)
    assert norm_activation.rms_norm(none, weight, eps=EPS).shape == (0, 8)
    assert norm_activation.gated_activation(none, "silu").shape == (0, 4)


def check_rotation_and_store_equal_the_layers(device: str) -> None:
    for dtype in (FLOAT32, BFLOAT16):
        rotation_agrees(device, dtype, Heads(tokens=5, query=6, kv=2, size=16, rotary=16, page=4))
        rotation_agrees(device, dtype, Heads(tokens=2, query=17, kv=1, size=12, rotary=12, page=1))


def check_part_of_a_head_is_rotated(device: str) -> None:
    rotation_agrees(device, BFLOAT16, Heads(tokens=3, query=2, kv=2, size=20, rotary=12, page=3))


def check_heads_are_normalized_before_their_rotation(device: str) -> None:
    heads = Heads(tokens=4, query=5, kv=2, size=16, rotary=16, page=2)
    for dtype, kind in product((FLOAT32, BFLOAT16), RMS_KINDS):
        rotation_agrees(device, dtype, heads, kind)


def check_float8_has_the_bits_that_a_cpu_stores(device: str) -> None:
    """Every number of the type, what lies between two and beside that, what is too large, zeros, infinities and NaN."""
    scales = torch.tensor([[1.0, 0.37], [3.0, 2.0**-9]])
    for stored, dtype in product((torch.float8_e4m3fn, torch.float8_e5m2), (FLOAT32, BFLOAT16)):
        numbers = float8_edges(stored).to(dtype)
        k, v = numbers.view(-1, 2, EDGES), numbers.flip(0).view(-1, 2, EDGES)
        heads = Heads(tokens=len(k), query=1, kv=2, size=EDGES, rotary=EDGES, page=4)
        slots, (q, cos, sin) = torch.arange(4, 4 + len(k)), unturned(heads, dtype)
        theirs, *ours = (pool_of(heads, stored, place) for place in ("cpu", device, device))
        for pool in (theirs, *ours):
            pool.set_scales(scales.expand(2, 2, 2))
        theirs.store(1, k, v, slots)
        q, k, v, cos, sin, slots = (x.to(device) for x in (q, k, v, cos, sin, slots))
        store_kv.store_kv(k, v, *ours[0].key_value(1), slots, scales=ours[0].scales_of(1))
        ours[1].turn_and_store(1, q, k, v, slots, HeadTurn(cos, sin, None))
        expected = theirs.data.float()
        assert torch.equal(ours[0].data.float().cpu().nan_to_num(9e9), expected.nan_to_num(9e9))
        # A rotation by nothing multiplies with zero, too.
        sound = k.cpu().isfinite().all(-1)
        pages, at = slots.cpu() // 4, slots.cpu() % 4
        found = ours[1].data.float().cpu()[pages, 1, :, :, at]
        assert torch.equal(found[:, 0][sound], expected[pages, 1, :, :, at][:, 0][sound])
        assert torch.equal(found[:, 1].nan_to_num(9e9), expected[pages, 1, :, :, at][:, 1].nan_to_num(9e9))


def float8_edges(dtype: torch.dtype) -> Tensor:
    """Whole tokens of 2 heads of float32, see above. Infinities and NaN have heads without other numbers."""
    every = torch.arange(256).to(torch.uint8).view(dtype).float()
    codes = every[every.isfinite()].unique()
    middle = (codes[1:] + codes[:-1]) / 2
    beside = [torch.nextafter(middle, torch.full_like(middle, end)) for end in (1e9, -1e9)]
    finite = torch.cat((codes, middle, *beside, torch.tensor([1e6, -1e6, 1e-30, -1e-30, 0.0, -0.0])))
    others = torch.tensor([torch.inf, -torch.inf, torch.nan])
    heads = [torch.cat((numbers, torch.zeros(-len(numbers) % EDGES))) for numbers in (finite, others)]
    numbers = torch.cat(heads)
    return torch.cat((numbers, torch.zeros(-len(numbers) % (2 * EDGES))))


def unturned(heads: Heads, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q, and the cosines and sines of angles that turn nothing."""
    angles = torch.ones(heads.tokens, heads.rotary, dtype=dtype)
    return torch.zeros(heads.tokens, heads.query, heads.size, dtype=dtype), angles, torch.zeros_like(angles)


def check_kv_is_stored_as_the_pool_stores_it(device: str) -> None:
    heads = Heads(tokens=6, query=1, kv=18, size=12, rotary=12, page=4)
    _, k, v, _, slots = qkv_of(heads, FLOAT32, device)
    for dtype in (FLOAT32, BFLOAT16):
        ours, theirs = pool_of(heads, dtype, device), pool_of(heads, dtype, "cpu")
        store_kv.store_kv(k, v, *ours.key_value(1), slots)
        theirs.store(1, k.cpu(), v.cpu(), slots.cpu())
        assert torch.equal(ours.data.cpu(), theirs.data)


def check_padding_is_stored_nowhere(device: str) -> None:
    heads = Heads(tokens=3, query=2, kv=2, size=8, rotary=8, page=2)
    q, k, v, rotation, slots = qkv_of(heads, BFLOAT16, device)
    slots[1] = -1
    for store in (store_kv.store_kv, with_rotation(q, rotation)):
        pool = pool_of(heads, BFLOAT16, device)
        pool.data.fill_(7.0)
        store(k, v, *pool.key_value(1), slots)
        untouched = torch.ones(pool.num_pages * 2, dtype=torch.bool, device=device)
        untouched[slots[[0, 2]]] = False
        by_slot = pool.data.permute(0, 4, 1, 2, 3, 5).flatten(0, 1)
        assert (by_slot[untouched] == 7.0).all()
        assert (by_slot[:, 0] == 7.0).all()
        assert not (by_slot[slots[0], 1] == 7.0).any()


def check_gated_activations(device: str) -> None:
    for dtype, name in product((FLOAT32, BFLOAT16), norm_activation.ACTIVATIONS):
        activation_agrees(device, dtype, name, tokens=3, size=1100)


def check_gates_far_from_zero(device: str) -> None:
    gate = torch.tensor([[-1e4, -200.0, -0.0, 200.0, 1e4, torch.nan]], device=device)
    for name, expected in (("silu", [0.0, 0.0, 0.0, 200.0, 1e4]), ("gelu_tanh", [0.0, 0.0, 0.0, 200.0, 1e4])):
        found = norm_activation.gated_activation(torch.cat((gate, torch.ones_like(gate)), 1), name)[0]
        assert found[:5].tolist() == expected, name
        assert found[5].isnan()


def norm_agrees(device: str, dtype: torch.dtype, kind: NormKind, *, tokens: int, size: int) -> None:
    """Alone and with the residual: the stream equal to the bit, norms within rounding of a CPU's and of float64's."""
    stored = random_floats(size, seed=2, dtype=dtype, device="cpu", scale=0.1)
    reference = cpu_norm.rms_norm(stored + 1 if kind is NormKind.PLAIN else stored, eps=EPS, kind=kind)
    weight = reference.weight.to(device)
    x = random_floats(tokens, size, seed=3, dtype=dtype, device=device)
    delta = random_floats(tokens, size, seed=4, dtype=dtype, device=device)
    expected = reference(x.cpu())
    assert units_apart(norm_activation.rms_norm(x, weight, eps=EPS).cpu(), expected) <= norm_units(dtype)
    wide = x.double() * (x.double().square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()
    assert units_apart(norm_activation.rms_norm(x, weight, eps=EPS), wide.to(dtype)) <= norm_units(dtype)
    hidden = x.clone()
    normed = norm_activation.add_rms_norm(hidden, delta, weight, eps=EPS)
    assert torch.equal(hidden, x + delta)
    assert torch.equal(normed, norm_activation.rms_norm(hidden, weight, eps=EPS))


def norm_units(dtype: torch.dtype) -> float:
    """bfloat16: one before the weight, which may become two, and the weight's own."""
    return 3.0 if dtype is BFLOAT16 else 8.0


def head_norm_agrees(device: str, dtype: torch.dtype, kind: NormKind, *, tokens: int, heads: int, size: int) -> None:
    """Of heads in the output of a projection, each with a weight of its own."""
    reference = cpu_norm.rms_norm(
        random_floats(heads, size, seed=5, dtype=dtype, device="cpu", scale=0.1), eps=EPS, kind=kind
    )  # fmt: skip
    x = random_floats(tokens, heads + 2, size, seed=6, dtype=dtype, device=device)[:, 1 : 1 + heads]
    found = norm_activation.rms_norm(x, reference.weight.to(device), eps=EPS)
    assert units_apart(found.cpu(), reference(x.cpu())) <= norm_units(dtype)


def qkv_of(heads: Heads, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor, Rotation, Tensor]:
    """q, k, v as views of one projection's output, angles of `rotary` dimensions, and slots out of order."""
    rows = heads.query + 2 * heads.kv
    qkv = random_floats(heads.tokens, rows, heads.size, seed=7, dtype=dtype, device=device)
    q, k, v = qkv.split_with_sizes((heads.query, heads.kv, heads.kv), dim=1)
    angle = random_floats(heads.tokens, 1, heads.rotary // 2, seed=8, dtype=FLOAT32, device="cpu", scale=3.0)
    sin = angle.sin()
    rotation = Rotation(
        torch.cat((angle.cos(), angle.cos()), -1).to(dtype).to(device), torch.cat((-sin, sin), -1).to(dtype).to(device)
    )
    order = torch.randperm(heads.tokens + 3, generator=torch.Generator().manual_seed(9))
    return q, k, v, rotation, (order[: heads.tokens] + heads.page).to(device)


def pool_of(heads: Heads, dtype: torch.dtype, device: str) -> KvPool:
    pages = 2 + (heads.tokens + 3) // heads.page + 1
    return KvPool(
        num_pages=pages, num_layers=2, num_kv_heads=heads.kv, head_dim=heads.size, page_size=heads.page, dtype=dtype,
        device=device,
    )  # fmt: skip


def with_rotation(q: Tensor, rotation: Rotation):
    """`rotate_and_store` with the arguments of `store_kv`."""
    turn = rotation.turn(None)
    return lambda k, v, keys, values, slots: rope_store.rotate_and_store(q, k, v, turn, keys, values, slots)


def rotation_agrees(device: str, dtype: torch.dtype, heads: Heads, kind: NormKind | None = None) -> None:
    """Equal to the bit without a norm, and within its rounding with one."""
    q, k, v, rotation, slots = qkv_of(heads, dtype, device)
    ours, theirs = pool_of(heads, dtype, device), pool_of(heads, dtype, "cpu")
    qk, norm = torch.cat((q, k), 1).cpu(), None
    if kind is not None:
        rows = random_floats(heads.query + heads.kv, heads.size, seed=10, dtype=dtype, device="cpu", scale=0.3)
        reference = cpu_norm.rms_norm(rows, eps=EPS, kind=kind)
        qk, norm = reference(qk), HeadNorm(reference.weight.to(device), EPS)
    on_cpu = Rotation(rotation.cos.cpu(), rotation.signed_sin.cpu())
    turned = torch.cat((on_cpu.apply(qk[..., : heads.rotary]), qk[..., heads.rotary :]), -1)
    theirs.store(1, turned[:, heads.query :], v.cpu(), slots.cpu())
    turn = rotation.turn(norm)
    found = rope_store.rotate_and_store(q, k, v, turn, *ours.key_value(1), slots).cpu()
    stored = ours.data.cpu()
    assert torch.equal(rope_store.rotate(q, turn).cpu(), found)
    assert torch.equal(stored[:, :, 1], theirs.data[:, :, 1])
    if kind is None:
        assert torch.equal(found, turned[:, : heads.query])
        assert torch.equal(stored, theirs.data)
    else:
        units = 6.0 if dtype is BFLOAT16 else 24.0
        assert units_apart(found, turned[:, : heads.query], at_least=0.25) <= units
        assert units_apart(stored, theirs.data, at_least=0.25) <= units


def activation_agrees(device: str, dtype: torch.dtype, name: str, *, tokens: int, size: int) -> None:
    gate_up = random_floats(tokens, 2 * size, seed=11, dtype=dtype, device=device, scale=3.0)
    reference = {"silu": cpu_activation.silu_and_multiply, "gelu_tanh": cpu_activation.gelu_tanh_and_multiply}[name]
    found, expected = norm_activation.gated_activation(gate_up, name).cpu(), reference(gate_up.cpu())
    if dtype is BFLOAT16:
        # Far below zero torch's GELU is a difference of almost equals: what counts there is its distance from zero.
        units = units_apart(found, expected, at_least=2.0**-6)
        assert units <= 2.0, (name, units)
        return
    gate, up = gate_up.double().cpu().chunk(2, dim=-1)
    wide = F.silu(gate) if name == "silu" else F.gelu(gate, approximate="tanh")
    torch.testing.assert_close(found.double(), wide * up, rtol=3e-5, atol=1e-7)


def compile_rms_norm(arch: int) -> None:
    cases = ((1, 1024, True), (1, 4096, True), (1, 8192, True), (40, 128, False))
    for heads, size, add in cases:
        signature = dict.fromkeys(("x", "delta", "weight", "out"), "*bf16:16") | {"num_rows": "i32", "eps": "fp32"}
        constants = norm_activation.rms_norm_constants(heads, size, add=add, round_first=True)
        compile_kernel(
            norm_activation.rms_norm_kernel, signature | {"token_stride": "i32:16"}, constants, arch=arch,
            num_warps=norm_activation.warps_of(constants["WIDTH"]),
        ).assert_fits()  # fmt: skip


def compile_rotation_and_store(arch: int) -> None:
    qwen, llama = (16, (9, 8, 16, 128)), (32, (9, 8, 16, 128))
    for heads, pool in (qwen, llama):
        rotation_compiles(heads, pool, "*bf16:16", norm=heads == 16, scaled=False, arch=arch)
        constants = store_kv.store_constants(pool, scaled=False)
        compile_kernel(
            store_kv.store_kernel, rotation_signature(store_kv.store_kernel, "*bf16:16"), constants, arch=arch,
            num_warps=store_kv.warps_of(constants["TILE"], 128),
        ).assert_fits()  # fmt: skip
    kind = "*fp8e4nv:16" if arch == HOPPER else "*fp8e5:16"
    rotation_compiles(32, llama[1], kind, norm=False, scaled=True, arch=arch)
    compile_kernel(
        store_kv.store_kernel, rotation_signature(store_kv.store_kernel, kind),
        store_kv.store_constants(llama[1], scaled=True), arch=arch,
        num_warps=store_kv.warps_of(llama[1][1], 128),
    ).assert_fits()  # fmt: skip
    rotation_compiles(40, (9, 40, 1, 128), "*bf16:16", norm=False, scaled=False, arch=arch, store=False)


def rotation_compiles(
    heads: int, pool: tuple[int, ...], stored: str, *, norm: bool, scaled: bool, arch: int, store: bool = True
) -> None:
    """Where nothing is stored, there are no slots, either."""
    constants = rope_store.rotate_store_constants(
        heads, pool, rotary=128, norm=norm, round_first=True, scaled=scaled, store=store
    )  # fmt: skip
    signature = rotation_signature(rope_store.rotate_store_kernel, stored)
    if not store:
        signature["slots"] = stored
    compile_kernel(
        rope_store.rotate_store_kernel, signature, constants,
        arch=arch,
        num_warps=store_kv.warps_of(constants["TILE"], constants["HALF_WIDTH"]),
        enable_fp_fusion=False,
    ).assert_fits()  # fmt: skip


def rotation_signature(kernel: Any, stored: str) -> dict[str, str]:
    """Types of what the kernel has of all this."""
    dense = dict.fromkeys(("q", "k", "v", "rotated_q", "cos", "sin", "weight"), "*bf16:16")
    pool = dict.fromkeys(("keys", "values"), stored) | dict.fromkeys(("k_scales", "v_scales"), "*fp32:16")
    strides = dict.fromkeys(("q_stride", "k_stride", "v_stride", "angle_stride", "page_stride"), "i32:16")
    kinds = dense | pool | strides | {"slots": "*i64:16", "eps": "fp32"}
    return {name: kind for name, kind in kinds.items() if name in kernel.arg_names}


def compile_gated_activation(arch: int) -> None:
    for size, name in ((3072, "silu"), (14336, "silu"), (9216, "gelu_tanh")):
        signature = dict.fromkeys(("gate_up", "out"), "*bf16:16") | {"token_stride": "i32:16"}
        constants = norm_activation.gated_activation_constants(size, name)
        compile_kernel(norm_activation.gated_activation_kernel, signature, constants, arch=arch).assert_fits()
