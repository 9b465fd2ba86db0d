"""What a peer's monotonic clock reads, in terms of ours: how old its messages are.

A message may lie unread for as long as its reader is stopped, or as a connection stalls. What it says of a duration
("good for 8 s") must be counted from when it was sent, not from when it was read: an engine that was frozen for half a
minute would otherwise take a grant for new whose pages have long been somebody else's [late-write] [one-clock].

Life of what is known of one peer
    1. unknown   nothing of it can be dated. Whoever has to asks a question, and the answer teaches
    2. known     we asked at `a`, it answered when its clock said `b`: what it sends at `b + t` was sent no earlier than
                 `a + t` here, less what two clocks drift apart meanwhile
    3. renewed   by every later answer that says more: a slow one dates everything too early. Forgotten when the peer is
                 fenced
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

DRIFT = 2e-4
"""Seconds per second that two clocks may differ by: twice what quartz does, each way."""


class _Exchange(NamedTuple):
    asked_at: float
    """By our clock."""
    answered_at: float
    """By the peer's."""


@dataclass(slots=True)
class PeerClocks:
    """Of one engine's peers, by incarnation."""

    _exchanges: dict[str, _Exchange] = field(default_factory=dict)

    def learn(self, incarnation: str, *, asked_at: float, answered_at: float, now: float) -> None:
        """It answered, when its clock said `answered_at`, what we asked at `asked_at`. Nonsense teaches nothing."""
        sensible = asked_at <= now and math.isfinite(asked_at) and math.isfinite(answered_at)
        if sensible and asked_at > self.earliest(incarnation, answered_at):
            self._exchanges[incarnation] = _Exchange(asked_at, answered_at)

    def earliest(self, incarnation: str, theirs: float) -> float:
        """Our time at or before which its clock said `theirs`; -inf while nothing is known of it."""
        exchange = self._exchanges.get(incarnation)
        if exchange is None or not math.isfinite(theirs):
            return -math.inf
        since = theirs - exchange.answered_at
        return exchange.asked_at + since - abs(since) * DRIFT

    def forget(self, incarnation: str) -> None:
        """The peer is gone."""
        self._exchanges.pop(incarnation, None)
