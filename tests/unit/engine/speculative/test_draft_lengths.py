"""As many drafts as make tokens come faster, measured against plain decoding, and none when none do."""

from dataclasses import dataclass, field

import pytest

from tandem_engine.speculative.adaptive_length import (
    FIRST_PLAIN_STEPS,
    FIRST_REST,
    TRIAL_DRAFTS,
    Acceptance,
    DraftLengths,
    Seeker,
)


@dataclass
class Machine:
    """Decodes streams of which each accepts the first `right` drafts of every step, at a price."""

    right: list[int]
    lengths: DraftLengths = field(default_factory=lambda: DraftLengths(longest=4))
    plain_s: float = 1.0
    fixed_s: float = 1.0
    draft_s: float = 0.02
    seconds: float = 0.0
    tokens: int = 0

    def __post_init__(self) -> None:
        self.acceptances = [Acceptance() for _ in self.right]
        self.seq_lens = [0] * len(self.right)

    def run(self, steps: int) -> list[list[int]]:
        """Lengths chosen in each of `steps`."""
        return [self.step() for _ in range(steps)]

    def step(self) -> list[int]:
        batch = len(self.right)
        chosen = [0] * batch
        if self.lengths.open(self.acceptances, batch=batch):
            seekers = [Seeker(a, n, 9) for a, n in zip(self.acceptances, self.seq_lens, strict=True)]
            chosen = self.lengths.choose(seekers, batch=batch)
        for stream, drafted in enumerate(chosen):
            accepted = min(self.right[stream], drafted)
            if drafted:
                self.lengths.learn(
                    self.acceptances[stream], drafted=drafted, accepted=accepted, seq_len=self.seq_lens[stream]
                )
            self.seq_lens[stream] += 1 + accepted
            self.tokens += 1 + accepted
        self._pass(batch, sum(chosen))
        return chosen

    def _pass(self, batch: int, drafts: int) -> None:
        seconds = self.fixed_s + self.draft_s * drafts if drafts else self.plain_s
        if drafts:
            self.lengths.costs.drafted(batch, drafts, seconds)
        else:
            self.lengths.costs.plain(batch, seconds)
        self.lengths.settled(batch=batch, drafted=drafts > 0)
        self.seconds += seconds

    def speed(self) -> float:
        """Against the same streams without drafts."""
        return self.tokens / len(self.right) * self.plain_s / self.seconds


def test_first_steps_run_without_drafts_as_baseline():
    chosen = Machine([4]).run(FIRST_PLAIN_STEPS + 1)
    assert chosen == [[0]] * FIRST_PLAIN_STEPS + [[4]]


def test_drafts_that_are_right_get_as_long_as_may_be():
    machine = Machine([4])
    assert machine.run(30)[-1] == [4]
    assert machine.speed() > 3


def test_drafts_with_low_acceptance_become_short():
    chosen = Machine([1], DraftLengths(longest=8), draft_s=0.1).run(200)
    assert {lengths[0] for lengths in chosen[50:]} <= {0, 1, 2, 3}
    assert any(lengths[0] for lengths in chosen[50:])


def test_drafts_that_are_never_right_cost_next_to_nothing():
    machine = Machine([0] * 8, fixed_s=2.0, draft_s=0.1)
    machine.run(2000)
    assert machine.speed() > 0.97


def test_accepted_drafts_that_cost_more_than_they_save_stop():
    # Five tokens per run, and yet a step of eight such runs takes longer than five plain steps.
    machine = Machine([4] * 8, fixed_s=2.0, draft_s=4.0 / 32)
    chosen = machine.run(3000)
    assert sum(any(lengths) for lengths in chosen) < 40
    assert machine.speed() > 0.97


def test_fixed_cost_disables_drafts_for_one_stream_not_eight():
    cheap_together = {"fixed_s": 1.9, "draft_s": 0.01}
    alone, all_of_them = Machine([4, *[0] * 7], **cheap_together), Machine([4] * 8, **cheap_together)
    assert not any(map(any, alone.run(300)[-100:-60]))
    assert all(any(lengths) for lengths in all_of_them.run(100)[-20:])


def test_only_requests_with_accepted_drafts_draft():
    chosen = Machine([4, 0]).run(400)
    assert sum(lengths[0] == 4 for lengths in chosen[100:200]) > 90
    assert sum(lengths[1] for lengths in chosen[100:200]) < 5


def test_rejected_drafts_are_tried_again_and_grow_when_they_are_accepted():
    machine = Machine([0, 0])
    machine.run(500)
    machine.right = [4, 4]
    machine.run(600)
    assert machine.step() == [4, 4]


def test_stream_becoming_predictable_starts_drafting():
    machine = Machine([4, 0])
    machine.run(200)
    machine.right = [4, 4]
    machine.run(100)
    assert machine.step() == [4, 4]


def test_machine_that_gets_faster_at_drafts_is_found_out():
    machine = Machine([4] * 4, draft_s=0.3)
    assert machine.run(300)[-1] == [0] * 4
    machine.draft_s = 0.01
    machine.run(8000)
    assert [4] * 4 in machine.run(3)


def test_trial_drafts_of_all_requests_share_steps():
    machine = Machine([0] * 4, fixed_s=3.0)
    tried = [lengths for lengths in machine.run(1500)[FIRST_REST:] if any(lengths)]
    assert tried
    assert all(lengths == [TRIAL_DRAFTS] * 4 for lengths in tried)


def test_new_requests_start_at_typical_acceptance():
    machine = Machine([0] * 8)
    machine.run(60)
    assert machine.lengths.typical < 0.3
    machine.acceptances = [Acceptance() for _ in machine.right]
    assert not any(machine.step())


def test_limits_of_requests_hold():
    lengths = DraftLengths(longest=4)
    for _ in range(FIRST_PLAIN_STEPS):
        lengths.settled(batch=2, drafted=False)
    assert lengths.choose([Seeker(Acceptance(), 0, 1), Seeker(Acceptance(), 0, 3)], batch=2) == [1, 3]


@pytest.mark.parametrize("batch", [1, 16])
def test_drafting_is_closed_if_best_acceptance_does_not_pay(batch):
    machine = Machine([4] * batch, draft_s=2.0)
    machine.run(100)
    acceptances = [Acceptance(rate=0.1), Acceptance(rate=0.99)]
    assert not machine.lengths.open(acceptances, batch=batch)
    machine = Machine([4] * batch)
    machine.run(100)
    assert machine.lengths.open(acceptances, batch=batch)
    assert not machine.lengths.open(acceptances[:1], batch=batch)


def test_lengths_that_do_not_adapt_stay():
    assert Machine([0], DraftLengths(longest=5, adaptive=False)).run(50) == [[5]] * 50
