"""The smallest pair of stages that hands requests from one engine to another.

KV pages are copied from pool to pool in one go when the prompt is done; nothing is lost, late or
reordered. It shows what the scheduler promises to stages, without a transport.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from tandem_engine.base.names import PageId, ReqPoolIdx, RequestId
from tandem_engine.forward.kv_progress import KvProgress
from tandem_engine.memory.allocator import Writer
from tandem_engine.messages.outputs import Finish
from tandem_engine.messages.requests import Handoff, HandoffSide, Peer
from tandem_engine.scheduler.request import Request
from tandem_testing.quiet_stage import FetchesNothing
from tandem_testing.scheduler_builders import Engine

NOWHERE = Peer(worker_id="w", incarnation="w@1", endpoint="inproc://w", compat_hash="h")


def make_handoff(side: HandoffSide, room: str) -> Handoff:
    return Handoff(side=side, room=room, generation=1, peer=NOWHERE)


@dataclass(kw_only=True)
class DirectReceiver(FetchesNothing):
    """Keeps RECEIVE requests until their KV is copied in."""

    engine: Engine
    waiting: dict[str, Request] = field(default_factory=dict)
    arrived: dict[str, tuple[int, list[torch.Tensor]]] = field(default_factory=dict)
    """Room → first token and bytes of the prompt's pages."""
    aborted_requests: list[Request] = field(default_factory=list)

    def accept(self, req: Request) -> bool:
        if req.handoff is None or req.handoff.side is not HandoffSide.RECEIVE:
            return False
        self.waiting[req.handoff.room] = req
        return True

    def poll(self) -> bool:
        moved = [room for room in [*self.waiting] if room in self.arrived and self._admit(room)]
        return bool(moved)

    def run_during_forward(self) -> bool:
        return False

    def chunk_launched(self, req: Request, stop: int, progress: KvProgress) -> None:
        """Nothing is sent before it is settled."""

    def chunk_settled(self, req: Request) -> None:
        """Nothing to send."""

    def prefill_settled(self, req: Request) -> bool:
        return False

    def aborted(self, req: Request) -> None:
        self.aborted_requests.append(req)

    def abort(self, rid: RequestId, finish: Finish) -> bool:
        for room, req in self.waiting.items():
            if req.rid == rid:
                del self.waiting[room]
                self.engine.scheduler.for_stages.finish(req, finish)
                return True
        return False

    def live(self) -> Iterator[Request]:
        yield from self.waiting.values()

    def held_pages(self) -> Iterator[PageId]:
        yield from ()

    def held_rows(self) -> Iterator[ReqPoolIdx]:
        yield from ()

    def _admit(self, room: str) -> bool:
        scheduler, memory, pool = self.engine.scheduler.for_stages, self.engine.memory, self.engine.model.pool
        req = self.waiting[room]
        first_token, pages = self.arrived[room]
        kv = memory.begin(req.fill_ids, space=req.space, max_match=req.seq_len - 1)
        if kv is None:
            return False
        cached = len(kv.pages)
        if len(pages) - cached > scheduler.spare_pages() or not memory.ensure(kv, req.seq_len, Writer.PEER):
            memory.release(kv, (), checkpoint=False, after_step=None)
            return False
        memory.load_back(kv, req.fill_ids)
        cached = kv.committed_len // kv.page_size
        for page, content in list(zip(kv.pages, pages, strict=True))[cached:]:
            pool.page_view(page).copy_(content)
        memory.commit(kv, req.seq_len)
        memory.checkpoint(kv, req.fill_ids, after_step=scheduler.step_in_flight)
        del self.waiting[room]
        req.kv = kv
        req.output_ids.append(first_token)
        req.streamed = len(req.output_ids)
        finish = scheduler.stop_of(req)
        if finish is None:
            scheduler.admit_prebuilt(req)
        else:
            scheduler.finish(req, finish)
        return True


@dataclass(kw_only=True)
class DirectSender(FetchesNothing):
    """Keeps SEND requests for `delay` polls after their prompt is done, then copies their pages."""

    engine: Engine
    receiver: DirectReceiver
    delay: int = 0
    kept: list[tuple[Request, int]] = field(default_factory=list)
    settled: dict[str, list[int]] = field(default_factory=dict)
    """rid → committed length at each settled chunk."""
    aborted_requests: list[Request] = field(default_factory=list)

    def accept(self, req: Request) -> bool:
        return False

    def poll(self) -> bool:
        due = [req for req, polls in self.kept if polls <= 0]
        self.kept = [(req, polls - 1) for req, polls in self.kept if polls > 0]
        for req in due:
            self._send(req)
        return bool(due)

    def run_during_forward(self) -> bool:
        return False

    def chunk_launched(self, req: Request, stop: int, progress: KvProgress) -> None:
        """Nothing is sent before it is settled."""

    def chunk_settled(self, req: Request) -> None:
        self.settled.setdefault(req.rid, []).append(req.held_kv.committed_len)

    def prefill_settled(self, req: Request) -> bool:
        if req.handoff is None or req.handoff.side is not HandoffSide.SEND or req.finished is not None:
            return False
        self.kept.append((req, self.delay))
        return True

    def aborted(self, req: Request) -> None:
        self.aborted_requests.append(req)

    def abort(self, rid: RequestId, finish: Finish) -> bool:
        for entry in self.kept:
            if entry[0].rid == rid:
                self.kept.remove(entry)
                self.engine.scheduler.for_stages.finish(entry[0], finish)
                return True
        return False

    def live(self) -> Iterator[Request]:
        yield from (req for req, _ in self.kept)

    def held_pages(self) -> Iterator[PageId]:
        yield from ()

    def held_rows(self) -> Iterator[ReqPoolIdx]:
        yield from ()

    def _send(self, req: Request) -> None:
        assert req.handoff is not None
        pool = self.engine.model.pool
        pages = req.held_kv.pages[: self.engine.memory.pages_for(req.seq_len - 1)]
        self.receiver.arrived[req.handoff.room] = (
            req.output_ids[-1],
            [pool.page_view(page).clone() for page in pages],
        )
        self.engine.scheduler.for_stages.release(req)


@dataclass(kw_only=True)
class Pair:
    """A prefill and a decode engine."""

    prefill: Engine
    decode: Engine
    sender: DirectSender
    receiver: DirectReceiver

    @staticmethod
    def of(prefill: Engine, decode: Engine, *, delay: int = 0) -> "Pair":
        receiver = DirectReceiver(engine=decode)
        sender = DirectSender(engine=prefill, receiver=receiver, delay=delay)
        prefill.scheduler.attach(sender)
        decode.scheduler.attach(receiver)
        return Pair(prefill=prefill, decode=decode, sender=sender, receiver=receiver)

    def run(self, max_steps: int = 5000) -> None:
        """Turn both loops until both are idle."""
        for _ in range(max_steps):
            if self.prefill.scheduler.idle and self.decode.scheduler.idle:
                return
            self.prefill.scheduler.step()
            self.decode.scheduler.step()
        raise AssertionError(f"not idle after {max_steps} steps")
