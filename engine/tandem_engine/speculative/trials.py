"""When to look again at what is taken for known, in batches of about one size.

    plain ──▶ drafting, while it pays ──`stretch` steps in a row──▶ plain, then drafting for twice as long
                 │ nobody's drafts pay          ▲
                 ▼                              │ they do
              resting ──`rest` steps──▶ trial ──┤
                 ▲                              │ they do not, or not for long: rest twice as long
                 └──────────────────────────────┘

Steps without drafts must be seen now and then to compare with, and drafts tried now and then, for texts and
machines change. All requests try in the same few steps: one by one they would end the overlap all the time.
Everything is counted in settled steps of that size, so it goes the same way on every rank.
"""

from dataclasses import dataclass

FIRST_PLAIN_STEPS = 6
PLAIN_STEPS = 3
"""Plain steps in a row, to be measured: the first, behind drafts, is none that tells."""
FIRST_STRETCH = 16
LONGEST_STRETCH = 256
"""Steps with drafts in a row, between plain ones that are measured."""
TRIAL_STEPS = 3
LASTING = 8
"""Steps with drafts in a row that show a gain to last."""
FIRST_REST = 32
LONGEST_REST = 1024
"""Plain steps between two trials that show no lasting gain."""


@dataclass(slots=True)
class Trials:
    """Of one size. Nothing is known at first."""

    plain_left: int = FIRST_PLAIN_STEPS
    """Steps that go without drafts in any case."""
    trial_left: int = 0
    """Steps that take drafts in any case, as soon as there are some."""
    rest: int = FIRST_REST
    until_trial: int = FIRST_REST
    stretch: int = FIRST_STRETCH
    in_a_row: int = 0
    """Steps with drafts since the last plain one."""

    def plain(self) -> None:
        """A step without drafts has settled."""
        self.in_a_row = 0
        self.plain_left = max(0, self.plain_left - 1)
        self.until_trial -= 1
        if self.until_trial == 0:
            self.trial_left = TRIAL_STEPS

    def drafted(self) -> None:
        """A step with drafts has settled."""
        self.in_a_row += 1
        if self.in_a_row == self.stretch:
            self.in_a_row, self.plain_left = 0, PLAIN_STEPS
            self.stretch = min(2 * self.stretch, LONGEST_STRETCH)
        if self.in_a_row == LASTING:
            self.rest = FIRST_REST
        if self.trial_left:
            self.tried()
        else:
            self.until_trial = self.rest

    def tried(self) -> None:
        """One of the steps of a trial has been, with drafts or in vain."""
        self.trial_left -= 1
        if self.trial_left == 0:
            self.until_trial = self.rest
            self.rest = min(2 * self.rest, LONGEST_REST)
