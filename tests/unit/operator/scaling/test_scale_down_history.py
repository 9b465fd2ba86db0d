"""A steady load whose need depends on the number of workers must not add and remove a worker forever.

`ClosedLoop` is the service of the end-to-end test: 24 clients, each of which sends a request after its response, eight
slots per decode worker, and workers that share two cores with prefill. Three workers leave prefill so little that only
some clients are in decode; with two workers more of them are.
"""

import random
from dataclasses import dataclass, field, replace

import pytest

from tandem_operator.scaling.load import DecodeLoad, Load, PrefillLoad
from tandem_operator.scaling.policy import Reduction, ScaleDownHistory, ScalingConfig, ScalingState, decide
from tandem_testing.fluid_service import config_of

PERIOD_S = 5.0
PLACES = 8


def quick(**changes) -> ScalingConfig:
    """A window of ten seconds, and one prefill worker whatever comes."""
    config = config_of(scale_down_window_s=10.0, cooldown_s=5.0, flip_roles=False, **changes)
    return replace(
        config,
        prefill=replace(config.prefill, most=1),
        decode=replace(config.decode, most=3, targets=replace(config.decode.targets, queue_seconds=0.2)),
    )


@dataclass
class ClosedLoop:
    """`clients` in the system; of them those in decode depend on how many workers there are."""

    config: ScalingConfig = field(default_factory=quick)
    clients: float = 24.0
    noise: float = 0.0
    dice: random.Random = field(default_factory=lambda: random.Random(7))
    there: int = 1
    memory: ScalingState = field(default_factory=ScalingState)
    now: float = 0.0
    history: list[int] = field(default_factory=list)

    def in_decode(self) -> float:
        """Of 24: 14 with three workers, 18 with two, 22 with one."""
        share = {1: 22 / 24, 2: 18 / 24, 3: 14 / 24}[self.there]
        return self.clients * share * (1 + self.dice.uniform(-self.noise, self.noise))

    def step(self) -> None:
        self.now += PERIOD_S
        running = min(self.in_decode(), self.there * PLACES)
        waiting = self.clients - running if running == self.there * PLACES else 0.0
        decode = DecodeLoad(
            running=running,
            waiting=waiting,
            oldest_wait_s=0.0,
            # No more than prefill lets through, with any decode workers.
            arrived_per_s=self.clients / 7.0 * (1 + self.dice.uniform(-self.noise, self.noise)),
            seconds_each=running / self.clients * 7.0,
            worker_places=PLACES,
            used_pages=running,
            worker_pages=100.0,
        )
        prefill = PrefillLoad(queued_tokens=0, oldest_wait_s=0, arrived_tokens_per_s=1, worker_tokens_per_s=1000)
        outcome = decide(
            Load(at=self.now, age_s=0.5, prefill=prefill, decode=decode),
            {"prefill": 1, "decode": self.there},
            self.memory,
            self.config,
        )
        self.memory, self.there = outcome.memory, outcome.wanted["decode"]
        self.history.append(self.there)

    def run(self, periods: int) -> list[int]:
        """Changes of each period."""
        for _ in range(periods):
            self.step()
        return [after - before for before, after in zip(self.history, self.history[1:], strict=False)]


def test_steady_load_scales_down_once_then_stays():
    loop = ClosedLoop()
    changes = loop.run(200)
    assert loop.there == 3
    assert changes.count(-1) == 1, loop.history


@pytest.mark.parametrize("seed", range(8))
def test_noisy_load_scales_down_ever_more_rarely(seed):
    """Samples of a short window are few: some are all low by chance. Each such mistake needs a lower one to happen."""
    loop = ClosedLoop(noise=0.2, dice=random.Random(seed))
    changes = loop.run(720)
    assert changes.count(-1) <= 10, loop.history
    assert changes[360:].count(-1) <= 2


def test_smaller_load_scales_down_at_once():
    loop = ClosedLoop()
    loop.run(60)
    assert loop.there == 3
    loop.clients = 12.0
    loop.run(8)
    assert loop.there <= 2, loop.history


def test_scale_down_that_outlasts_its_trial_is_allowed_again():
    """A day's rise and fall: each evening goes down at the need of the evening before."""
    first = ScaleDownHistory().went_down(Reduction(0.0, 2, 1.7, 3.0))
    assert first.went_up(41.0, 2, 3.0, trial_s=40.0).min_workers(1.7, 0.1) == 0
    rejected = first.went_up(40.0, 2, 3.0, trial_s=40.0)
    assert rejected.min_workers(1.7, 0.1) == rejected.min_workers(1.54, 0.1) == 3
    assert rejected.min_workers(1.52, 0.1) == 0
    again = rejected.went_down(Reduction(100.0, 2, 1.5, 3.0))
    assert again.went_up(500.0, 2, 3.0, trial_s=40.0).min_workers(1.7, 0.1) == 0


def test_only_scale_up_from_the_tried_number_rejects_it():
    history = ScaleDownHistory().went_down(Reduction(0.0, 3, 2.6, 3.0)).went_down(Reduction(5.0, 2, 1.7, 3.0))
    assert history.went_up(10.0, 3, 3.0, trial_s=40.0) == ScaleDownHistory()
    rejected = history.went_up(10.0, 2, 3.0, trial_s=40.0)
    assert rejected.went_up(20.0, 4, 3.0, trial_s=40.0).min_workers(1.7, 0.1) == 3


def test_scale_up_for_a_higher_load_rejects_nothing():
    """Else every rise after a lull would keep a worker more through the next lulls."""
    history = ScaleDownHistory().went_down(Reduction(0.0, 2, 1.7, 3.0))
    assert history.went_up(20.0, 2, 3.1, trial_s=40.0) == ScaleDownHistory()
    assert history.went_up(20.0, 2, 3.0, trial_s=40.0).rejected_floor is not None
