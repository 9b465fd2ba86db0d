"""Where the time of a handoff goes: phases from calls that both processes note, which share the machine's clock.

    prepare    sender: ranges of pages, and starting WRITEs; within `write`
    write      sender: until the last WRITE has been given back
    digests    sender: what its digests take beyond that
    notify     sender: from the transfer thread to the scheduler
    record     sender: until the handoff record is sent
    control    until the receiver has the record
    verify     receiver: its digests, on its transfer thread and back
    install    receiver: pages to the request, and the request to the scheduler

All but `prepare` follow each other, so they sum up to the whole.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from tandem_engine.disaggregation.decode import DecodeStage
from tandem_engine.disaggregation.digest import PageDigester
from tandem_engine.disaggregation.nixl import thread
from tandem_engine.disaggregation.nixl.agent import NixlAgent
from tandem_engine.disaggregation.nixl.queues import Outbox
from tandem_engine.disaggregation.peers import PeerChannels
from tandem_engine.disaggregation.prefill import PrefillStage
from tandem_engine.disaggregation.transport import PushDone
from tandem_engine.forward.kv_progress import KvProgress
from tandem_engine.messages.transfer import HandoffRecord

COMPUTED, DESCRIBE, POST, GIVE_BACK, DIGEST = "computed", "describe", "post", "give back", "digest"
MADE, RECEIVED, SEND, RECORD, PROVED = "made", "received", "send", "record", "proved"


class Mark(NamedTuple):
    """One call, in seconds of `time.perf_counter`."""

    label: str
    began: float
    ended: float


@dataclass(slots=True)
class Marks:
    """The calls of this process."""

    noted: list[Mark] = field(default_factory=list)

    def note(self, label: str) -> None:
        """Something that has no duration."""
        now = time.perf_counter()
        self.noted.append(Mark(label, now, now))

    def taken(self) -> list[Mark]:
        """All of them, once."""
        noted, self.noted = self.noted, []
        return noted

    def watch(self, owner: Any, name: str, label: str, only: Callable[..., bool] = lambda *_, **__: True) -> None:
        """Note each call of a function of a class or module from now on."""
        call = getattr(owner, name)

        @wraps(call)
        def noted(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                if only(*args, **kwargs):
                    self.noted.append(Mark(label, began, time.perf_counter()))

        setattr(owner, name, noted)

    def watch_transport(self) -> None:
        """What the transfer thread does, and the record."""
        self.watch(thread, "describe", DESCRIBE)
        self.watch(NixlAgent, "write", POST)
        self.watch(NixlAgent, "release", GIVE_BACK)
        self.watch(PageDigester, "begin", DIGEST)
        self.watch(Outbox, "put", MADE, only=lambda _, event: isinstance(event, PushDone))
        self.watch(PeerChannels, "send", SEND, only=lambda _, __, message: isinstance(message, HandoffRecord))

    def watch_stages(self) -> None:
        """What an engine's scheduler does."""
        self.watch(KvProgress, "ended", COMPUTED)
        self.watch(PrefillStage, "on_push_done", RECEIVED)
        self.watch(DecodeStage, "on_record", RECORD)
        self.watch(DecodeStage, "on_digests", PROVED)


def phases(sender: Sequence[Mark], receiver: Sequence[Mark], start: float) -> dict[str, float]:
    """Milliseconds of each phase of one handoff; what was over before `start` takes none."""
    posted = sum(mark.ended - max(mark.began, start) for mark in sender if mark.label == POST and mark.ended > start)
    described = sum(mark.ended - mark.began for mark in sender if mark.label == DESCRIBE and mark.began > start)
    ends = [start]
    for marks, label, last in (
        (sender, GIVE_BACK, "ended"),
        (sender, MADE, "ended"),
        (sender, RECEIVED, "began"),
        (sender, SEND, "ended"),
        (receiver, RECORD, "began"),
        (receiver, PROVED, "began"),
        (receiver, PROVED, "ended"),
    ):
        ends.append(max([ends[-1], *(getattr(mark, last) for mark in marks if mark.label == label)]))
    names = ("write", "digests", "notify", "record", "control", "verify", "install")
    lasted = [after - before for before, after in pairwise(ends)]
    return {name: 1e3 * s for name, s in zip(("prepare", *names), (posted + described, *lasted), strict=True)}


def counts(sender: Sequence[Mark]) -> dict[str, int]:
    """How often the sender's host did what it did for one handoff."""
    labels = {"WRITEs": POST, "digests": DIGEST, "pushes": MADE, "records": SEND}
    return {name: sum(mark.label == label for mark in sender) for name, label in labels.items()}


def medians(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of each phase, over all rounds."""
    return {name: round(median(one[name] for one in rounds), 3) for name in rounds[0]} if rounds else {}
