"""One end of a handoff under test, and the other that a test plays line by line."""

from collections.abc import Sequence

from tandem_engine.messages.kv_events import BASE_SPACE
from tandem_engine.messages.outputs import FinishReason
from tandem_engine.messages.requests import HandoffSide
from tandem_engine.messages.transfer import TransferAborted, WriteGrant
from tandem_testing.disagg_network import PeerNetwork, make_peer
from tandem_testing.disagg_pair import PROMPT, Side, handoff, make_side
from tandem_testing.disagg_script import ScriptedPeer, make_scripted_peer
from tandem_testing.fake_executor import next_token
from tandem_testing.fake_transport import FakeFabric
from tandem_testing.scheduler_builders import VOCAB, make_message

ROOM = "room-r"
WRITER = make_peer("p")


class PlayedEnd:
    """One engine under test, the other end played line by line."""

    def __init__(self, side: HandoffSide, **engine: object) -> None:
        me, other = ("d", "p") if side is HandoffSide.RECEIVE else ("p", "d")
        self.fabric, self.network = FakeFabric(), PeerNetwork()
        self.side_of_engine = side
        self.side: Side = make_side(make_peer(me), fabric=self.fabric, network=self.network, **engine)
        self.other: ScriptedPeer = make_scripted_peer(
            make_peer(other), self.side.peer, fabric=self.fabric, network=self.network, clock=self.side.engine.clock
        )

    def submit(self, rid: str = "r", prompt: Sequence[int] = PROMPT, *, generation: int = 1, **request: object) -> None:
        end = handoff(self.side_of_engine, self.other.me, f"room-{rid}", generation)
        self.side.engine.add(make_message(rid, prompt, handoff=end, **request))
        self.turn()

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.fabric.advance()
            self.side.step()

    def pass_time(self, seconds: float) -> None:
        self.side.engine.clock.time += seconds
        self.turn()


class Receiver(PlayedEnd):
    """A decode engine, and the prefill engine that the test plays."""

    def __init__(self, **engine: object) -> None:
        super().__init__(HandoffSide.RECEIVE, **engine)
        self.writer = self.other

    def granted(self, rid: str = "r", prompt: Sequence[int] = PROMPT, **request: object) -> WriteGrant:
        """Submit, and be the writer that has computed the prompt."""
        self.submit(rid, prompt, **request)
        self.writer.learn_pools()
        self.writer.fill(tuple(prompt))
        return self.writer.grant()

    def transferred(self, **request: object) -> WriteGrant:
        """A whole transfer but for the last look at the digests."""
        grant = self.granted(**request)
        self.writer.write(grant)
        self.writer.record(grant, first_token(PROMPT))
        return grant

    def is_cached(self, prompt: Sequence[int] = PROMPT) -> bool:
        return self.side.engine.memory.cached_len(tuple(prompt), space=BASE_SPACE, max_match=len(prompt)) > 0

    def held(self) -> list[int]:
        return [*self.side.stage.held_pages()]

    def aborts(self) -> list[TransferAborted]:
        return self.side.link.messages(TransferAborted)

    def assert_failed(self, why: str, rid: str = "r") -> None:
        """The gateway was notified once, with a retryable error."""
        finish = self.side.finish(rid)
        assert finish is not None
        assert finish.error is not None
        assert (finish.reason, finish.code, finish.retryable) == (FinishReason.ERROR, "transfer_error", True)
        assert why in finish.error
        assert self.side.tokens(rid) == []

    def drain(self, rid: str = "r", *, generation: int = 1) -> None:
        self.writer.ack(f"room-{rid}", generation=generation)
        self.turn()


def first_token(prompt: Sequence[int]) -> int:
    return next_token(prompt, vocab_size=VOCAB)
