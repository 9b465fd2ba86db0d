"""Which incarnation of each worker may still be listened to.

Life of an incarnation, `worker_id@number` with a number that grows at each start of the worker
    1. unknown      it never spoke
    2. current      the newest of its worker that has spoken
    3. superseded   a newer one has spoken: it is dead, and what it still says is dropped for ever
"""

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from tandem_engine.errors import WireError
from tandem_engine.messages.requests import Peer


class Observation(NamedTuple):
    """What a message says about its sender."""

    accepted: bool
    superseded: str | None = None
    """The older incarnation that this message proves dead."""


_NUMBER = re.compile(r"[0-9]{1,20}")
"""Bounded, because turning thousands of digits into a number is slow, and at some length refused."""


@dataclass(kw_only=True, slots=True)
class Incarnations:
    """The newest number heard of per worker."""

    newest: dict[str, int] = field(default_factory=dict)

    def observe(self, peer: Peer) -> Observation:
        """Judge the sender of a message. Raises `WireError` when its names contradict each other."""
        number = incarnation_number(peer)
        known = self.newest.get(peer.worker_id)
        if known is not None and number < known:
            return Observation(accepted=False)
        self.newest[peer.worker_id] = number
        if known is None or number == known:
            return Observation(accepted=True)
        return Observation(accepted=True, superseded=f"{peer.worker_id}@{known}")

    def is_superseded(self, peer: Peer) -> bool:
        """Whether a newer incarnation of the same worker has spoken."""
        return incarnation_number(peer) < self.newest.get(peer.worker_id, -1)


def incarnation_number(peer: Peer) -> int:
    """The number of `worker_id@number`. Raises `WireError` when `incarnation` is not the worker's."""
    worker_id, at, number = peer.incarnation.rpartition("@")
    if worker_id != peer.worker_id or not at or not _NUMBER.fullmatch(number):
        raise WireError(f"incarnation {peer.incarnation!r} is not a number of worker {peer.worker_id!r}")
    return int(number)
