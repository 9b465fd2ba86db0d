"""A step keeps the interpreter lock until its layers compute, so that the scheduler's thread runs beside them."""

import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from tandem_engine.executor.runner import ModelRunner
from tandem_engine.forward.batch import RESOLVE
from tandem_engine.forward.future_map import FutureMap
from tandem_engine.model.attention.cpu import CpuAttention
from tandem_engine.sampling.sampler import Sampler
from tandem_testing.forward_builders import NUM_HEADS, PLAIN, PageDealer, make_batch, make_pool
from tandem_testing.toy_model import ToyModel

FOREVER = 60.0
STEPS, MAX_STEPS = 100, 10_000
HEAD_START = 100e-6
"""Seconds in which the bystander comes to wait for the lock. Should it not, a step passes that might have failed."""


class Bystander:
    """A thread that takes the lock whenever it is released."""

    def __init__(self) -> None:
        self.turns = 0
        self._ends = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._ends = True
        self._thread.join()

    def _run(self) -> None:
        while not self._ends:
            self.turns += 1
            time.sleep(0)  # releases the lock, and takes it again


@dataclass
class WatchedModel(ToyModel):
    """Notes how many turns the bystander had when the layers began."""

    bystander: Bystander | None = None
    turns: list[int] = field(default_factory=list)

    def forward(self, input_ids: Tensor, positions: Tensor, attend, wanted: Tensor) -> Tensor:
        if self.bystander is not None:
            self.turns.append(self.bystander.turns)
        return super().forward(input_ids, positions, attend, wanted)


@pytest.fixture
def bystander() -> Iterator[Bystander]:
    interval = sys.getswitchinterval()
    # No thread is made to release the lock.
    sys.setswitchinterval(FOREVER)
    bystander = Bystander()
    yield bystander
    bystander.close()
    sys.setswitchinterval(interval)


@torch.inference_mode()
def test_forward_keeps_interpreter_lock_until_first_layer(bystander):
    pool = make_pool()
    toy = ToyModel.random()
    model = WatchedModel(embedding=toy.embedding, position=toy.position, head=toy.head)
    runner = ModelRunner(
        model=model,
        pool=pool,
        backend=CpuAttention(pool, num_heads=NUM_HEADS, specs=PLAIN),
        sampler=Sampler(),
        future_map=FutureMap(8),
    )
    dealer = PageDealer(pool=pool)
    sequences = [dealer.decode(length) for length in (5, 40, 17)]
    batches = [make_batch(sequences) for _ in range(STEPS)]
    for batch in batches:
        batch.input_ids.fill_(RESOLVE)
    runner._future_map.publish(torch.tensor([1]), torch.tensor([7]))
    runner.forward(batches[0])  # compiles
    model.bystander = bystander
    before: list[int] = []
    # Where cores are few, another process may have the one that the bystander would take.
    while len(before) < STEPS or (before[-1] == before[0] and len(before) < MAX_STEPS):
        for batch in batches:
            began = time.perf_counter()
            while time.perf_counter() < began + HEAD_START:
                pass
            before.append(bystander.turns)
            runner.forward(batch)
    assert model.turns == before
    assert before[-1] > before[0], "the bystander never ran, and the test proves nothing"
