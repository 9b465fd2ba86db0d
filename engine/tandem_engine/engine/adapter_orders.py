"""Operators' orders about the adapters of an engine: in the same turn on each of its ranks."""

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

from tandem_engine.base.errors import EngineError
from tandem_engine.engine.adapter_shelf import LoadingShelf
from tandem_engine.messages.control import LoadAdapter, ServedAdapter, UnloadAdapter
from tandem_engine.model.adapters.loaded import LoadedAdapters
from tandem_engine.scheduler.scheduler import Scheduler


class ChangedAdapter(NamedTuple):
    """What an order did."""

    adapter: ServedAdapter
    """That is served from now on, or no more."""
    former: str = ""
    """Digest of what its name stood for before a load, in hexadecimal; "" for nothing."""


class _Loading(NamedTuple):
    order: LoadAdapter
    loaded: "Future[LoadedAdapters]"
    answer: "Future[ChangedAdapter]"


@dataclass(kw_only=True, slots=True)
class AdapterOrders:
    """Scheduler thread only."""

    shelf: LoadingShelf
    scheduler: Scheduler
    _expected: "deque[Future[ChangedAdapter]]" = field(default_factory=deque)
    """Of rank 0: orders that were submitted and have not started."""
    _loading: list[_Loading] = field(default_factory=list)
    """In the order in which they started."""

    @property
    def active(self) -> bool:
        """An adapter is being loaded, or an order has not started."""
        return bool(self._expected or self._loading)

    def expect(self) -> "Future[ChangedAdapter]":
        """What the order that is about to be submitted will come to. Rank 0 only."""
        self._expected.append(Future())
        return self._expected[-1]

    def start(self, order: LoadAdapter | UnloadAdapter) -> None:
        """Begin to carry out `order`, in the same turn on every rank."""
        answer: Future[ChangedAdapter] = self._expected.popleft() if self._expected else Future()
        try:
            if isinstance(order, LoadAdapter):
                self._loading.append(_Loading(order, self.shelf.loads.begin(order.name, order.path), answer))
                return
            self.shelf.loads.require_allowed()
            gone = self.shelf.table.remove(order.name, digest=order.digest, cached=order.cached)
        except EngineError as error:
            answer.set_exception(error)
            return
        answer.set_result(ChangedAdapter(gone))

    def poll(self) -> None:
        """Once a turn: serve what has been loaded, in the order of the orders."""
        while self._loading and self._loading[0].loaded.done():
            order, loaded, answer = self._loading.pop(0)
            try:
                answer.set_result(self._add(order, loaded.result()))
            except EngineError as error:
                answer.set_exception(error)

    def _add(self, order: LoadAdapter, loaded: LoadedAdapters) -> ChangedAdapter:
        former = next((each.digest for each in self.shelf.table.served if each.name == order.name), "")
        usage = self.scheduler.adapter_usage()
        adapter = self.shelf.add(loaded, replaces=order.replaces, digest=order.digest, pinned=order.pinned, usage=usage)
        return ChangedAdapter(adapter, former)
