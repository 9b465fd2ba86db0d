"""Runs of tokens by the gated delta rule: listed, as a device takes them, against the layer that runs over each."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch
from torch import Tensor

from tandem_engine.forward.batch import ForwardBatch, Snapshot
from tandem_engine.kernels.interface import DeltaKernels
from tandem_engine.kernels.triton.delta_runs import (
    CHUNK,
    WALK_WARPS,
    unit_lower_inverse,
    unit_lower_inverse_kernel,
    walk_constants,
    walk_runs,
    walk_runs_kernel,
)
from tandem_engine.kernels.triton.delta_step import delta_step
from tandem_engine.memory.listed_runs import RunRoom, list_runs
from tandem_engine.memory.state_pool import StatePool, StepStates
from tandem_engine.model.layers import delta_rule
from tandem_engine.model.layers.delta import DeltaHeads, GatedDelta, StatefulAttend
from tandem_engine.model.layers.linear import Linear
from tandem_testing.forward_builders import Seq, make_batch
from tandem_testing.triton_kernels.ahead_of_time import SHARED_LIMIT, compile_kernel
from tandem_testing.triton_kernels.delta_step import LAYER, TAPS, TOLERANCE, Heads, Layer
from tandem_testing.triton_kernels.tensors import random_floats, to_device

KERNELS = DeltaKernels(step=delta_step, inverse=unit_lower_inverse, walk=walk_runs)


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of sequences over a layer whose projections give what they are given."""

    layer: Layer
    batch: ForwardBatch
    projected: Tensor
    rates: Tensor

    @classmethod
    def make(cls, layer: Layer, sequences: Sequence[Seq], *, snapshots: tuple[Snapshot, ...] = ()) -> "Step":
        heads, batch = layer.heads, replace(make_batch(sequences), snapshots=snapshots)
        width = heads.channels + heads.value_width
        numbers = {"dtype": heads.dtype, "device": layer.device}
        return cls(
            layer=layer,
            batch=batch,
            projected=random_floats(batch.num_tokens, width, seed=7, **numbers),
            rates=random_floats(batch.num_tokens, 2 * heads.values, seed=8, **numbers),
        )

    def by_torch(self, pool: StatePool) -> Tensor:
        """Sequence after sequence."""
        batch = replace(to_device(self.batch, self.layer.device), on_host=self.batch)
        return self._delta(None)._by_torch(StepStates.of(pool, batch), self.projected, self.rates)

    def listed(self, pool: StatePool, room: RunRoom | None = None, kernels: DeltaKernels = KERNELS) -> Tensor:
        """By kernels; `room`: with as much padding as that has."""
        own = RunRoom.of(self.batch)
        room = room or own
        lists = list_runs(self.batch, TAPS - 1, room)
        lists = type(lists)(**{name: getattr(lists, name).to(self.layer.device) for name in lists.__slots__})
        projected, rates = (
            torch.cat((each, each.new_zeros(room.tokens - own.tokens, each.shape[1])))
            for each in (self.projected, self.rates)
        )
        return self._delta(kernels)._listed(pool, lists, projected, rates)[: own.tokens]

    def _delta(self, kernels: DeltaKernels | None) -> GatedDelta:
        heads, none = self.layer.heads, Linear(weight=torch.empty(0), bias=None)
        return GatedDelta(
            norm=lambda hidden: hidden,
            heads=DeltaHeads(
                keys=heads.keys, values=heads.values, key_size=heads.key_size, value_size=heads.value_size
            ),
            place=LAYER,
            inputs=none,
            rates=none,
            weights=self.layer.weights,
            kernels=kernels,
            output=none,
        )


def sequences(*lens: tuple[int, int], decodes: int = 0) -> list[Seq]:
    """Of (new, all) tokens each, in rows from 1 on; then decodes."""
    runs = [
        Seq(seq_len=total, extend_len=new, pages=[1] * -(-total // 16), row=1 + place)
        for place, (new, total) in enumerate(lens)
    ]
    return runs + [Seq(seq_len=9, decode=True, pages=[1], row=1 + len(lens) + place) for place in range(decodes)]


def agrees(step: Step, room: RunRoom | None = None, kernels: DeltaKernels = KERNELS) -> None:
    """Outputs, states of all sequences, and copies."""
    spec, device = step.layer.pool.spec, step.layer.device
    here, there = (StatePool(spec, rows=step.layer.pool.rows, device=device) for _ in range(2))
    for pool in (here, there):
        pool.bytes_view().copy_(step.layer.pool.bytes_view())
    expected, found = step.by_torch(here), step.listed(there, room, kernels)
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE[expected.dtype] * 4)
    for found, expected in ((there.matrices[1:], here.matrices[1:]), (there.inputs[1:], here.inputs[1:])):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4, equal_nan=True)


def check_inverses_of_triangles(device: str) -> None:
    systems = random_floats(2, 3, CHUNK, CHUNK, seed=1, dtype=torch.float32, device=device, scale=0.3)
    identity = torch.eye(CHUNK, dtype=torch.float64, device=device)
    expected = torch.linalg.inv(systems.double().tril(-1) + identity)
    unread = torch.ones_like(systems, dtype=torch.bool).triu()
    found = unit_lower_inverse(systems.masked_fill(unread, torch.nan)).double()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def check_runs_of_several_sequences(device: str) -> None:
    """They begin or continue, have less than a chunk, a whole one or more, and decodes beside them."""
    for heads in (Heads(), Heads(keys=3, values=3, key_size=16, value_size=40), Heads(dtype=torch.bfloat16)):
        layer = Layer.make(heads, device)
        agrees(Step.make(layer, sequences((70, 70), (2, 9), decodes=1)))
        agrees(Step.make(layer, sequences((64, 64), (130, 200))))
        agrees(Step.make(layer, sequences((1, 1))))


def check_states_are_copied_within_a_run(device: str) -> None:
    layer = Layer.make(Heads(), device)
    for cut in (64, 10, 69):
        agrees(Step.make(layer, sequences((70, 70), (3, 3)), snapshots=(Snapshot(0, cut, 5),)))
    agrees(Step.make(layer, sequences((70, 100)), snapshots=(Snapshot(0, 40, 4), Snapshot(0, 96, 5))))


def check_padding_changes_nothing(device: str) -> None:
    """As a graph has it: more tokens, sequences, chunks and decodes than the step."""
    layer = Layer.make(Heads(), device)
    room = RunRoom(tokens=96, sequences=3, chunks=5, decodes=4)
    agrees(Step.make(layer, sequences((70, 70), (2, 9), decodes=1), snapshots=(Snapshot(0, 64, 5),)), room)
    agrees(Step.make(layer, sequences((5, 5))), room)


def check_parts_of_a_step_are_computed_one_after_the_other(device: str) -> None:
    """Sequences that begin or continue reach from one part into the next, and so do their copies."""
    layer, sizes = Layer.make(Heads(), device), []

    def inverse(system: Tensor) -> Tensor:
        sizes.append(len(system))
        return unit_lower_inverse(system)

    lens = sequences((70, 70), (130, 130), (130, 200), decodes=1)
    with patch.object(delta_rule, "MIN_TOGETHER", 1):
        agrees(Step.make(layer, lens, snapshots=(Snapshot(1, 128, 5),)), kernels=KERNELS._replace(inverse=inverse))
    assert sizes == [4, 4], "chunks that 331 tokens fill"


def check_former_content_of_a_fresh_slot_is_not_read(device: str) -> None:
    layer = Layer.make(Heads(), device)
    layer.pool.bytes_view()[1] = 0xFF
    agrees(Step.make(layer, sequences((70, 70), (2, 9))))


def check_layer_takes_lists_from_its_attend(device: str) -> None:
    layer = Layer.make(Heads(), device)
    step = Step.make(layer, sequences((5, 5)))
    delta = replace(step._delta(KERNELS), inputs=lambda _: step.projected, rates=lambda _: step.rates)
    lists = list_runs(step.batch, TAPS - 1, RunRoom.of(step.batch))
    lists = type(lists)(**{name: getattr(lists, name).to(device) for name in lists.__slots__})
    attend = StatefulAttend(None, StepStates.of_listed(layer.pool), lists)
    found = delta.attend(0, step.projected, None, attend)
    torch.testing.assert_close(found, step.by_torch(layer.pool), rtol=0, atol=1e-4)


def compile_for_qwen3_next_and_qwen35(arch: int) -> None:
    """Whole, and a rank of four."""
    compile_kernel(
        unit_lower_inverse_kernel, dict.fromkeys(("system", "out"), "*fp32:16"), {"SIZE": CHUNK}, arch=arch
    ).assert_fits()
    for heads in (32, 8):
        built = compile_kernel(
            walk_runs_kernel,
            {
                **dict.fromkeys(("solved", "query", "key", "attention", "whole", "matrices", "out"), "*fp32:16"),
                **dict.fromkeys(("rows", "slots"), "*i64"),
                "fresh": "*u8",
                "first_chunks": "*i32",
                "matrices_stride": "i32:16",
            },
            walk_constants(heads=heads, key_size=128, value_size=128, shared_bytes=SHARED_LIMIT[arch]),
            arch=arch,
            num_warps=WALK_WARPS,
            num_stages=1,
        )
        built.assert_fits()
        assert any(name.endswith("MMA") for name in built.instructions()), f"{built.what} uses no tensor cores"
