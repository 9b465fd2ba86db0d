"""An engine process that commits faults on demand: `tandem_engine.cli serve` with knobs.

    python -m tandem_testing.chaos.engine_main KNOBS_FILE --model … (the flags of `serve`)

The product's own parts do all the work; these stand around them, at the seams the product defines:

    FaultyTransport   the NIXL transport, whose contract it keeps
    FaultyPeers       the channels to peers, the same
    FaultyForward     around `ModelRunner.forward`
"""

import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from tandem_engine import cli
from tandem_engine.base.clock import Clock
from tandem_engine.disaggregation.nixl import transport as nixl_transport
from tandem_engine.disaggregation.nixl.transport import NixlTransport
from tandem_engine.disaggregation.peers import PeerChannels, PeerEvent, PeerInbound
from tandem_engine.disaggregation.transport import DigestOrder, Digests, PagePool, Push, StateSlots, TransportEvent
from tandem_engine.engine import peer_setup
from tandem_engine.executor.runner import ModelRunner
from tandem_engine.forward.batch import ForwardBatch, ForwardResult
from tandem_engine.ipc.channels import IpcContext
from tandem_engine.messages.requests import Peer
from tandem_engine.messages.transfer import HandoffRecord
from tandem_testing import raised_in_processes
from tandem_testing.chaos.knobs import ENGINE, RAISED, KnobReader

KILLED = signal.SIGKILL


class InjectedFaultError(Exception):
    """A step failed because a scenario wanted it to."""


class FaultyTransport(NixlTransport):
    """The real transport with a bad day. Belongs to the scheduler thread."""

    def __init__(
        self,
        *,
        knobs: KnobReader,
        me: Peer,
        pool: PagePool,
        clock: Clock,
        leave: Callable[[str], None],
        states: StateSlots | None = None,
    ) -> None:
        super().__init__(me=me, pool=pool, states=states, clock=clock, leave=leave)
        self._knobs, self._bytes, self._time = knobs, pool.bytes_view(), clock
        self._held: deque[tuple[float, Push]] = deque()

    def push(self, push: Push) -> None:
        knobs = self._knobs.now()
        if knobs.die_at == "before-push":
            self._die("before-push")
        if knobs.hold_push_s:
            self._knobs.note("hold_push")
            self._held.append((self._time.now() + knobs.hold_push_s, push))
            return
        super().push(push)
        if knobs.die_at == "push":
            self._die("push")

    def digest(self, order: DigestOrder) -> None:
        if self._knobs.take("corrupt"):
            self._bytes[order.pages[0]] ^= 0x5A
        super().digest(order)

    def poll(self) -> list[TransportEvent]:
        knobs = self._knobs.now()
        if knobs.block_s and self._knobs.take("block_s"):
            time.sleep(knobs.block_s)
        while self._held and self._time.now() >= self._held[0][0]:
            super().push(self._held.popleft()[1])
        events = super().poll()
        if knobs.die_at == "digest" and any(isinstance(event, Digests) for event in events):
            self._die("digest")
        return events

    def _die(self, at: str) -> None:
        self._knobs.note(at)
        os.kill(os.getpid(), KILLED)


class FaultyPeers(PeerChannels):
    """The real channels to peers with a bad day. Belongs to the scheduler thread."""

    def __init__(self, *, knobs: KnobReader, context: IpcContext, inbound: PeerInbound, me: Peer) -> None:
        super().__init__(context=context, inbound=inbound, me=me)
        self._knobs = knobs

    def receive(self) -> Iterator[PeerEvent]:
        reported: list[PeerEvent] = []
        for event in super().receive():
            if not isinstance(event, HandoffRecord):
                reported.append(event)
            elif not self._knobs.take("lose_records"):
                reported += [event] * (3 if self._knobs.take("repeat_records") else 1)
        if len(reported) > 1 and self._knobs.take("reverse_messages"):
            reported.reverse()
        yield from reported


@dataclass(kw_only=True, slots=True)
class FaultyForward:
    """Fails steps: those that a poisoned request takes part in, or the next one."""

    knobs: KnobReader

    def before(self, batch: ForwardBatch) -> None:
        if self.knobs.take("lose_device"):
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered (injected)")
        knobs = self.knobs.now()
        if knobs.poison < 0 or not bool((batch.input_ids == knobs.poison).any()):
            return
        self.knobs.note("poison")
        if knobs.poison_effect == "die":
            os.kill(os.getpid(), KILLED)
        raise InjectedFaultError(f"step {batch.step} has token {knobs.poison}")


def install(knobs: KnobReader) -> None:
    """Put the faulty parts around the real ones. Before anything is built, and for the life of the process."""
    real_forward = ModelRunner.forward
    faulty = FaultyForward(knobs=knobs)

    def forward(runner: ModelRunner, batch: ForwardBatch) -> ForwardResult:
        faulty.before(batch)
        return real_forward(runner, batch)

    put_in_place_of(nixl_transport, "NixlTransport", partial(FaultyTransport, knobs=knobs))
    put_in_place_of(peer_setup, "PeerChannels", partial(FaultyPeers, knobs=knobs))
    put_in_place_of(ModelRunner, "forward", forward)


def put_in_place_of(owner: object, name: str, faulty: object) -> None:
    """Raises `AttributeError` when `owner` has nothing of that name: an engine would run without its faults."""
    getattr(owner, name)
    setattr(owner, name, faulty)


def main(argv: list[str]) -> int:
    knobs_file, *flags = argv
    if (raised := Path(knobs_file).with_suffix(RAISED) / ENGINE).is_dir():
        raised_in_processes.install(raised)
    install(KnobReader(path=Path(knobs_file)))
    return cli.main(["serve", *flags])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
