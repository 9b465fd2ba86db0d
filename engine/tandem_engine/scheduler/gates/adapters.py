"""Requests that wait until the adapter that computes them is in memory.

    ingress ──begin──▶ in memory: the request continues at once
                  └──▶ else the shelf loads it, once for all requests with the same content
                         poll ─▶ loaded: its requests continue, also those that a stage keeps
                              └▶ failed: its requests end with the reason, which is worth another attempt elsewhere

A request that waits is in `Queues.compiling`, as one that waits for its grammar [one-home]; it blocks no other request.

The shelf has room for so many adapters. When it is full, one makes way for an adapter that requests wait for: first one
that no request has, later one that is used. Of the requests that have it

    those without KV       wait for their adapter again, behind the others
    those that compute     continue; if their adapter has to leave at once, they release their KV and wait as well
    those in a stage       need no adapter while their KV is moving: one that receives it waits when it has arrived

So only requests that compute keep an adapter from others, and these wait for nothing: adapters add no cycle to what
requests wait for. Outputs do not depend on it: what was released is computed again, as after a retraction.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from tandem_engine.base.clock import Clock
from tandem_engine.base.errors import AdapterMissingError, EngineError
from tandem_engine.messages.requests import AdapterRef
from tandem_engine.scheduler.counters import Tally
from tandem_engine.scheduler.finishing import Endings, error_finish
from tandem_engine.scheduler.queues import Queues
from tandem_engine.scheduler.request import Request, sends_kv


class Loaded(NamedTuple):
    """An adapter that requests wait for is in memory, or cannot be loaded."""

    digest: bytes
    error: EngineError | None = None


class MakesWay(NamedTuple):
    """New requests of this adapter wait until it is loaded again."""

    digest: bytes
    at_once: bool = False
    """Those that compute do so, too."""


class Usage(NamedTuple):
    """Requests by the digest of an adapter in memory."""

    computing: Counter[bytes]
    waiting: Counter[bytes]


class AdapterShelf(Protocol):
    """The memory for adapters. Scheduler thread only."""

    def holds(self, ref: AdapterRef) -> bool:
        """Whether a request may have it now. Raises `AdapterMissingError` where it cannot be loaded either."""
        ...

    def use(self, ref: AdapterRef) -> None:
        """A request has it from now on: of those in memory it is the last to make way."""
        ...

    def want(self, ref: AdapterRef) -> None:
        """Load it as soon as there is room. No-op for one that is wanted already."""
        ...

    def poll(self, wanted: Mapping[bytes, object], usage: Callable[[], Usage]) -> Sequence[Loaded | MakesWay]:
        """What has happened since, in order. `wanted`: digests that requests wait for; others are given up."""
        ...


@dataclass(frozen=True, slots=True)
class FixedShelf:
    """What was loaded with the model, and nothing else."""

    slots: Mapping[bytes, int] = field(default_factory=dict)

    def holds(self, ref: AdapterRef) -> bool:
        """See `AdapterShelf`."""
        if ref.digest not in self.slots:
            raise AdapterMissingError(f"adapter {ref.name!r} is not loaded in this engine")
        return True

    def use(self, ref: AdapterRef) -> None:
        """See `AdapterShelf`."""

    def want(self, ref: AdapterRef) -> None:
        """See `AdapterShelf`."""
        raise AssertionError(f"adapter {ref.name!r} is either here or refused")

    def poll(self, *_: object) -> Sequence[Loaded | MakesWay]:
        """See `AdapterShelf`."""
        return ()


def _nothing() -> None:
    pass


@dataclass(kw_only=True, slots=True)
class AdapterGate:
    """Scheduler thread only."""

    shelf: AdapterShelf
    queues: Queues
    endings: Endings
    tally: Tally
    clock: Clock
    stand_still: Callable[[], None] = _nothing
    """Completes the steps in flight."""
    waiting: dict[bytes, list[Request]] = field(default_factory=dict)
    """By digest, in the order in which they began to wait."""

    def begin(self, req: Request, ref: AdapterRef | None) -> None:
        """Before a new request is in a queue. Raises `AdapterMissingError` for one that cannot be computed here."""
        if ref is None:
            return
        if self.shelf.holds(ref):
            self.shelf.use(ref)
        else:
            self._hold_up(req, ref)

    def check(self, ref: AdapterRef | None) -> None:
        """Raise `AdapterMissingError` as `begin` would. Changes nothing: rank 0 alone calls it."""
        if ref is not None:
            self.shelf.holds(ref)

    def poll(self) -> bool:
        """Once per iteration: requests continue, end or wait. True if anything changed."""
        if not self.waiting:
            return False
        self._forget_ended()
        happened = self.shelf.poll(self.waiting, self.usage)
        for each in happened:
            if isinstance(each, Loaded):
                self._decide(each)
            else:
                self._make_way(each)
        return bool(happened)

    def _forget_ended(self) -> None:
        for digest, requests in [*self.waiting.items()]:
            left = [req for req in requests if req.finished is None]
            if left:
                self.waiting[digest] = left
            else:
                del self.waiting[digest]

    def _decide(self, loaded: Loaded) -> None:
        for req in self.waiting.pop(loaded.digest, ()):
            if loaded.error is None:
                self._continue(req)
            else:
                self._end(req, loaded.error)

    def _continue(self, req: Request) -> None:
        req.awaits_adapter = False
        req.adapter_wait_s += self.clock.now() - req.adapter_awaited_at
        self.queues.ready(req)

    def _end(self, req: Request, error: EngineError) -> None:
        finish = req.to_finish or error_finish(error)
        if req.rid in self.queues.requests:
            self.endings.finish(req, finish)
            return
        for stage in self.queues.stages:
            if stage.abort(req.rid, finish):
                return

    def _hold_up(self, req: Request, ref: AdapterRef) -> None:
        req.awaits_adapter = True
        req.adapter_awaited_at = self.clock.now()
        self.waiting.setdefault(ref.digest, []).append(req)
        self.shelf.want(ref)

    def _make_way(self, order: MakesWay) -> None:
        if order.at_once:
            self._put_back(order.digest)
        for req in [*self._waiting_of(order.digest)]:
            self._hold_up(req, _ref(req))
            self.queues.hold_up(req)

    def _put_back(self, digest: bytes) -> None:
        """Requests that compute release their KV. Those whose pages are being sent keep them where they are
        [settled-only-sent], and end soon. `max_retractions` is about want of pages, so this does not count there."""
        if not any(self._computing_of(digest)):
            return
        self.stand_still()
        for req in reversed([*self._computing_of(digest)]):
            self.endings.release(req, checkpoint=True)
            self.queues.waiting.return_to_head(req)
            self.tally.retracted += 1
        self.queues.running = [req for req in self.queues.running if req.kv is not None]
        if self.queues.chunked is not None and self.queues.chunked.kv is None:
            self.queues.chunked = None

    def _computing_of(self, digest: bytes) -> Iterator[Request]:
        chunked = () if self.queues.chunked is None else (self.queues.chunked,)
        for req in (*self.queues.running, *chunked):
            if req.space.adapter == digest and req.finished is None and not sends_kv(req):
                yield req

    def _waiting_of(self, digest: bytes) -> Iterator[Request]:
        """Requests that will compute with it, but not now."""
        for req in self.queues.live():
            if req.space.adapter == digest and not req.awaits_adapter and self._is_waiting(req):
                yield req

    def _is_waiting(self, req: Request) -> bool:
        if req.rid in self.queues.requests:
            # With KV it computes; one that waits for its grammar with KV does not.
            return req.kv is None or req.rid in self.queues.compiling
        return not sends_kv(req)

    def usage(self) -> Usage:
        """Requests that have their adapter."""
        usage = Usage(Counter(), Counter())
        for req in self.queues.live():
            if not req.space.adapter or req.awaits_adapter:
                continue
            if self._is_waiting(req):
                usage.waiting[req.space.adapter] += 1
            elif req.rid in self.queues.requests:
                usage.computing[req.space.adapter] += 1
        return usage


def _ref(req: Request) -> AdapterRef:
    assert req.adapter is not None, f"request {req.rid} has no adapter"
    return req.adapter
