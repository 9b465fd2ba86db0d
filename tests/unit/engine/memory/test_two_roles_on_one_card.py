"""Two processes size their pools on one card: one after the other or at once, each gets what its share says."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import pytest
import torch

from tandem_engine.base.errors import ConfigError
from tandem_engine.config import CacheConfig, EngineConfig, SchedulerConfig
from tandem_engine.executor import memory_profile
from tandem_engine.executor.memory_profile import Footprint, plan_pool
from tandem_engine.forward.batch import ForwardResult
from tandem_engine.memory import pool as pool_module
from tandem_engine.memory.pool import KvPool
from tandem_engine.parallel.group import Parallel

MIB = 1 << 20
CARD, DRIVER, WEIGHTS, ACTIVATIONS = 80_000 * MIB, 500 * MIB, 12_000 * MIB, 4_000 * MIB
"""Of the card; what the driver takes for a process; of a model and its largest step."""
SHARE = 0.44
POOL = int(CARD * SHARE) - WEIGHTS - ACTIVATIONS
STEPS = ("load", "run the largest step", "have run it", "plan", "take the pool")


@dataclass
class Process:
    """Implements `MemoryMeter` for one process on the card, and goes through an engine's start."""

    card: "list[Process]"
    share: float = SHARE
    own: int = 0
    """What its allocator has."""
    pages: int = 0
    _steps: Iterator[str] = field(default_factory=lambda: iter(STEPS))

    def __post_init__(self) -> None:
        self.card.append(self)

    def total(self) -> int:
        return CARD

    def used(self) -> int:
        return self.own

    def available(self) -> int:
        return CARD - sum(process.own + DRIVER for process in self.card)

    def peak_growth(self, run) -> int:
        run()
        return ACTIVATIONS

    def start(self, monkeypatch) -> None:
        for _ in STEPS:
            self.next_step(monkeypatch)

    def next_step(self, monkeypatch) -> None:
        step = next(self._steps)
        if step == "load":
            self.own += WEIGHTS
        elif step == "run the largest step":
            self.own += ACTIVATIONS
        elif step == "have run it":
            self.own -= ACTIVATIONS
        elif step == "plan":
            monkeypatch.setattr(memory_profile, "meter_for", lambda _: self)
            self.pages = plan_pool(self._config(), FOOTPRINT, Parallel()).pages
        else:
            assert self.available() >= self.pages * MIB, "torch would raise"
            self.own += self.pages * MIB

    def _config(self) -> EngineConfig:
        return EngineConfig(
            model_path="model",
            device="cuda",
            scheduler=SchedulerConfig(context_length=64),
            cache=CacheConfig(mem_fraction_static=self.share),
        )


FOOTPRINT = Footprint(
    weight_bytes=WEIGHTS,
    page_bytes=MIB,
    host_page_bytes=MIB,
    threads=1,
    forward_over=lambda _: lambda batch: ForwardResult(step=batch.step, next_token_ids=()),
)


def orders() -> Iterator[Sequence[int]]:
    """Every way in which two starts can fall into each other, one after the other among them."""
    for first in combinations(range(2 * len(STEPS)), len(STEPS)):
        yield [0 if turn in first else 1 for turn in range(2 * len(STEPS))]


def test_two_processes_get_their_share_in_any_start_order(monkeypatch, caplog):
    # A thread for each measurement would take seconds.
    monkeypatch.setattr(memory_profile, "_measure", lambda *_: ACTIVATIONS)
    caplog.set_level("WARNING")
    sizes = set()
    for order in orders():
        card: list[Process] = []
        both = Process(card), Process(card)
        for turn in order:
            both[turn].next_step(monkeypatch)
        sizes.add(tuple(process.pages * MIB for process in both))
    assert sizes == {(POOL, POOL)}


def test_second_process_needing_whole_card_is_rejected(monkeypatch):
    monkeypatch.setattr(memory_profile, "_measure", lambda *_: ACTIVATIONS)
    card: list[Process] = []
    first, second = Process(card, share=0.88), Process(card, share=0.88)
    first.start(monkeypatch)
    with pytest.raises(ConfigError, match=r"one request .* 0\.88 of 78\.12 GiB .* available"):
        second.start(monkeypatch)


def test_kv_pool_out_of_memory_names_mem_fraction_static(monkeypatch):
    """Both measured before either took its pool."""

    def none_left(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(pool_module.torch, "zeros", none_left)
    with pytest.raises(ConfigError, match=r"0\.03 GiB of KV pages do not fit cuda:0 any more.*--mem-fraction-static"):
        KvPool(
            num_pages=64, num_layers=8, num_kv_heads=8, head_dim=128, page_size=16,
            dtype=torch.bfloat16, device="cuda:0",
        )  # fmt: skip
