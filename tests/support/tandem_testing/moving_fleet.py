"""Engines on the fake model that leave one another their running requests, and a client that does what a gateway does.

    running on A ─▶ A says `leaving` ─▶ abort at A; the two ends of one handoff to A and B ─▶ running on B
                └─▶ A refuses or ends, or a transfer fails ─▶ everything so far, alone, to B

Tokens are accepted by position and once, from the current attempt.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from tandem_engine.base.names import RequestId
from tandem_engine.messages.outputs import Finish, FinishReason, TokenLogprob, TokenOutput
from tandem_engine.messages.requests import GenerateRequest, Handoff, HandoffSide
from tandem_testing.disagg_network import PeerNetwork, make_peer
from tandem_testing.disagg_pair import Side, make_side
from tandem_testing.fake_transport import FakeFabric
from tandem_testing.scheduler_builders import expected_output


@dataclass(kw_only=True)
class Stream:
    """One request as its client sees it."""

    message: GenerateRequest
    side: Side
    """The side that generates."""
    number: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None
    moves: int = 0
    failures: int = 0
    read: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Outputs looked at so far, by worker and attempt."""

    @property
    def rid(self) -> RequestId:
        return RequestId(f"{self.message.rid}-{self.number}")

    def attempt(self, handoff: Handoff | None = None) -> GenerateRequest:
        return msgspec.structs.replace(self.message, rid=self.rid, resume_ids=tuple(self.tokens), handoff=handoff)

    def accept(self, output: TokenOutput) -> None:
        new = len(self.tokens) - output.index
        assert new >= 0, f"{self.rid}: output {output.index} after {len(self.tokens)} tokens"
        self.tokens += output.token_ids[new:]
        self.logprobs += (output.logprobs or ())[new:]


@dataclass(kw_only=True)
class MovingFleet:
    """Several engines, one fabric, one client. Time stands still but for `turn`."""

    sides: list[Side]
    fabric: FakeFabric
    network: PeerNetwork
    has_room: Callable[[], bool] = lambda: True
    """Asked when a request should leave: whether there is a worker for it."""
    streams: list[Stream] = field(default_factory=list)
    left: list[Side] = field(default_factory=list)
    """Sides that get no new requests."""

    def submit(self, message: GenerateRequest, side: Side, *, prefill: Side | None = None) -> Stream:
        """Begin a request on `side`; with `prefill`, that one computes the prompt and hands it over."""
        stream = Stream(message=message, side=side)
        self.streams.append(stream)
        if prefill is None:
            self._send(stream, side, stream.attempt())
        else:
            self._hand_over(stream, prefill, side, moving=False)
        return stream

    def drain(self, side: Side) -> None:
        """As SIGTERM to its worker."""
        self.left.append(side)
        side.engine.scheduler.drain()

    def flip(self, side: Side, *, prefill: bool) -> None:
        """As `tandem ctl role`."""
        if prefill:
            self.left.append(side)
        else:
            self.left.remove(side)
        side.engine.scheduler.decode_elsewhere(wanted=prefill)

    def end(self, side: Side, *, reported: bool = True) -> None:
        """As the end of its process, when its time to drain is over: what is still there, or on its way, is lost.

        Unless it is `reported`, the other engines notice only its silence.
        """
        successor = self.other(side)
        self.sides.remove(side)
        self.fabric.kill(side.peer.incarnation)
        self.network.kill(side.peer.incarnation)
        for other in self.sides if reported else ():
            other.stage.peer_ended(side.peer.incarnation)
        for stream in self.streams:
            if stream.finish is None and stream.side is side:
                self._resume(stream, successor)

    def turn(self, seconds: float = 0.05) -> None:
        for side in self.sides:
            side.step()
            self.network.advance()
            self.fabric.advance()
            side.engine.clock.time += seconds
        for stream in self.streams:
            if stream.finish is None:
                self._listen(stream)

    def run(self, turns: int = 2000) -> None:
        """Until every stream has ended and every engine rests."""
        for _ in range(turns):
            if all(stream.finish for stream in self.streams) and self.at_rest():
                return
            self.turn()
        raise AssertionError(f"not at rest: {[stream.rid for stream in self.streams if stream.finish is None]}")

    def at_rest(self) -> bool:
        return (
            all(side.engine.scheduler.idle and not [*side.stage.held_pages()] for side in self.sides)
            and not self.fabric.in_flight()
            and not self.network.in_flight()
        )

    def assert_exact(self) -> None:
        """Every stream is what one undisturbed engine gives, and no page is lost."""
        for stream in self.streams:
            assert stream.tokens == expected_output(stream.message), stream.rid
            if stream.message.sampling.logprobs is not None:
                assert len(stream.logprobs) == len(stream.tokens), stream.rid
        for side in self.sides:
            side.assert_clean()

    @property
    def moved(self) -> int:
        """Requests that arrived elsewhere with their KV."""
        return sum(side.stage.counters.moved for side in self.sides)

    def other(self, side: Side) -> Side:
        """The side after `side`, of those that take new requests."""
        start = self.sides.index(side) + 1
        order = [*self.sides[start:], *self.sides[:start]]
        return next(other for other in order if other not in self.left)

    def _listen(self, stream: Stream) -> None:
        for side in self.sides:
            key = (side.peer.worker_id, rid := stream.rid)
            received = side.engine.received.get(rid)
            for output in received.outputs[stream.read[key] :] if received else ():
                stream.read[key] += 1
                if rid == stream.rid:
                    self._take(stream, side, output)

    def _take(self, stream: Stream, side: Side, output: TokenOutput) -> None:
        if output.leaving:
            if self.has_room():
                self._move(stream, side, self.other(side))
            return
        stream.accept(output)
        if output.finish is None:
            return
        if output.finish.reason in (FinishReason.ERROR, FinishReason.ABORT):
            assert output.finish.retryable, f"{stream.rid}: {output.finish}"
            self._resume(stream, self.other(side))
        else:
            stream.finish = output.finish

    def _move(self, stream: Stream, leaving: Side, to: Side) -> None:
        leaving.engine.scheduler.abort(stream.rid)
        stream.number += 1
        stream.moves += 1
        self._hand_over(stream, leaving, to, moving=True)

    def _hand_over(self, stream: Stream, sender: Side, to: Side, *, moving: bool) -> None:
        room = f"room-{stream.rid}"
        send = Handoff(side=HandoffSide.SEND, room=room, generation=stream.number, peer=to.peer, moving=moving)
        receive = Handoff(side=HandoffSide.RECEIVE, room=room, generation=stream.number, peer=sender.peer)
        self._send(stream, to, stream.attempt(receive))
        sender.engine.add(stream.attempt(send))

    def _resume(self, stream: Stream, side: Side) -> None:
        for old in self.sides:
            old.engine.scheduler.abort(stream.rid)
        stream.number += 1
        stream.failures += 1
        self._send(stream, side, stream.attempt())

    def _send(self, stream: Stream, side: Side, message: GenerateRequest) -> None:
        stream.side = side
        side.engine.add(message)


def make_fleet(workers: Sequence[str] = ("a", "b", "c"), **engine: object) -> MovingFleet:
    """One engine per name, all alike."""
    fabric, network = FakeFabric(), PeerNetwork()
    sides = [make_side(make_peer(name), fabric=fabric, network=network, **engine) for name in workers]
    return MovingFleet(sides=sides, fabric=fabric, network=network)
