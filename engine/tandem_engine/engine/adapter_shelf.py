"""Adapters that requests bring into memory, and which ones make way for them.

    want     a request needs an adapter that is not in memory; it names the folder, or the engine has it
    load     when there is room: a thread reads, checks and digests the folder (`AdapterLoads`)
    bring    between two steps, if the content is the one that the request has: other content is refused, not served

A full memory gets room from adapters that no request has, the least recently used first. Where all are used, each has a
turn of `turn_s` seconds: after that it makes way for an adapter that has waited as long, oldest first. The adapter with
the fewest requests that compute goes. What still computes after `MAX_TURNS` further turns is put back into the queue,
so no adapter waits for longer than that, whatever the length of outputs. Pinned adapters make no way.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from tandem_engine.base.clock import Clock
from tandem_engine.base.errors import AdapterMissingError, BusyError, ConfigError, EngineError
from tandem_engine.base.logs import escape
from tandem_engine.config import AdapterConfig
from tandem_engine.config.adapters import check_adapter_name
from tandem_engine.engine.adapter_loads import AdapterLoads
from tandem_engine.engine.loaded_model import LoadedModel, reads_halves
from tandem_engine.messages.control import (
    MAX_FAILED_ADAPTERS,
    MAX_FAILURE_TEXT,
    MAX_REFUSED_ADAPTERS,
    AdapterMemory,
    FailedAdapter,
    ServedAdapter,
)
from tandem_engine.messages.requests import AdapterRef
from tandem_engine.model.adapters.loaded import LoadedAdapters
from tandem_engine.model.adapters.table import AdapterTable
from tandem_engine.parallel.agreement import Agreement
from tandem_engine.scheduler.gates.adapters import Loaded, MakesWay, Usage

# Adapters that could not be loaded for a request.
#
# refused     for `REFUSED_S`: retries of the request would read the folder each time
# reported    for `REPORTED_S` after the last failure, or until one is loaded under the name: for statuses

REFUSED_S = 15.0
REPORTED_S = 600.0


@dataclass(frozen=True, slots=True)
class _Failure:
    report: FailedAdapter | None
    """None under a name that no adapter can have."""
    reason: str
    """Whole."""
    at: float


@dataclass(kw_only=True, slots=True)
class FailedLoads:
    """Of one engine. `now`: seconds of the clock that all ranks agree on."""

    changes: int = 0
    """Grows whenever `refused` or `reported` changes."""
    _failures: dict[bytes, _Failure] = field(default_factory=dict)
    """By digest, the newest last."""
    _refused: set[bytes] = field(default_factory=set)

    def note(self, ref: AdapterRef, reason: str, *, now: float) -> None:
        """A load has failed."""
        self._failures.pop(ref.digest, None)
        while len(self._failures) >= MAX_REFUSED_ADAPTERS:
            self.forget(next(iter(self._failures)))
        self._failures[ref.digest] = _Failure(_report_of(ref, reason), reason, now)
        self._refused.add(ref.digest)
        self.changes += 1

    def loaded(self, name: str, digest: bytes) -> None:
        """It is in memory. Failures with other content that the name stood for are over, too."""
        self.forget(digest)
        former = [
            each
            for each, failure in self._failures.items()
            if failure.report is not None and failure.report.name == name
        ]
        for each in former:
            self.forget(each)

    def forget(self, digest: bytes) -> None:
        """Neither refuse nor report it."""
        if self._failures.pop(digest, None) is not None:
            self._refused.discard(digest)
            self.changes += 1

    def refusal(self, digest: bytes, *, now: float) -> str | None:
        """Why it is not to be read again yet; None if it may be."""
        self.expire(now)
        return self._failures[digest].reason if digest in self._refused else None

    def expire(self, now: float) -> None:
        """Forget what is over."""
        for digest in [each for each, failure in self._failures.items() if now - failure.at >= REPORTED_S]:
            self.forget(digest)
        over = {each for each in self._refused if now - self._failures[each].at >= REFUSED_S}
        if over:
            self._refused -= over
            self.changes += 1

    @property
    def refused(self) -> Iterator[bytes]:
        """Digests."""
        return iter(self._refused)

    @property
    def reported(self) -> tuple[FailedAdapter, ...]:
        """The newest failures, by name."""
        reports = [failure.report for failure in self._failures.values() if failure.report is not None]
        return tuple(sorted(reports[-MAX_FAILED_ADAPTERS:], key=lambda report: (report.name, report.digest)))


def _report_of(ref: AdapterRef, reason: str) -> FailedAdapter | None:
    """Readers refuse a whole report with a name, or with text, that is not well-formed."""
    try:
        check_adapter_name(ref.name)
    except ConfigError:
        return None
    return FailedAdapter(name=ref.name, digest=ref.digest.hex(), reason=escape(reason)[:MAX_FAILURE_TEXT])


logger = logging.getLogger(__name__)

MAX_TURNS = 4


@dataclass(kw_only=True, slots=True)
class _Wanted:
    ref: AdapterRef
    folder: str
    since: float
    loading: "Future[LoadedAdapters] | None" = None


@dataclass(kw_only=True, slots=True)
class LoadingShelf:
    """Of one engine. Scheduler thread only."""

    table: AdapterTable
    loads: AdapterLoads
    clock: Clock
    loads_total: int = 0
    """Adapters that requests have brought in."""
    failures_total: int = 0
    evictions_total: int = 0
    load_s_total: float = 0.0
    _wanted: dict[bytes, _Wanted] = field(default_factory=dict)
    """In the order in which they were first needed."""
    _turns: dict[bytes, float] = field(default_factory=dict)
    """When the turn of an adapter in memory began."""
    _left: dict[bytes, float] = field(default_factory=dict)
    """When an adapter that is used began to make way."""
    _failed: FailedLoads = field(default_factory=FailedLoads)

    @property
    def config(self) -> AdapterConfig:
        return self.loads.config

    @property
    def changes(self) -> tuple[int, int, int]:
        """Another one after every change of `memory` and of names."""
        self._failed.expire(self.clock.now())
        return self.table.changes, self.failures_total, self._failed.changes

    @property
    def in_use(self) -> bool:
        """Whether there is, or was, anything to report."""
        return self.table.used or bool(self._wanted) or self.loads_total + self.failures_total > 0

    def memory(self) -> AdapterMemory:
        """What routing requires."""
        refused = (*self._failed.refused, *self.table.unloaded)
        return AdapterMemory(
            limit=self.table.limit,
            loads=self.loads.allowed and bool(self.config.folder),
            resident=tuple(sorted(digest.hex() for digest in self.table.resident)),
            refused=tuple(sorted(digest.hex() for digest in refused))[:MAX_REFUSED_ADAPTERS],
            failed=self._failed.reported,
            mean_size=self.table.mean_size,
            byte_s=self.table.byte_s,
        )

    def holds(self, ref: AdapterRef) -> bool:
        """See `AdapterShelf`."""
        if self.table.holds(ref.digest):
            return True
        gone = ref.digest in self.table.closed or ref.digest in self.table.unloaded
        if gone or not self._folder_of(ref):
            raise AdapterMissingError(f"adapter {ref.name!r} is not loaded in this engine")
        refusal = self._failed.refusal(ref.digest, now=self.clock.now())
        if refusal is not None:
            raise AdapterMissingError(refusal)
        return False

    def use(self, ref: AdapterRef) -> None:
        """See `AdapterShelf`."""
        self.table.use(ref.digest)

    def want(self, ref: AdapterRef) -> None:
        """See `AdapterShelf`."""
        if ref.digest not in self._wanted:
            folder = self._folder_of(ref)
            self._wanted[ref.digest] = _Wanted(ref=ref, folder=folder, since=self.clock.now())

    def poll(self, wanted: Mapping[bytes, object], usage: Callable[[], Usage]) -> Sequence[Loaded | MakesWay]:
        """See `AdapterShelf`."""
        for digest in self._wanted.keys() - wanted.keys():
            loading = self._wanted.pop(digest).loading
            if loading is not None:
                loading.cancel()
        happened: list[Loaded | MakesWay] = [*self._arrived()]
        for loaded in happened:
            del self._wanted[loaded.digest]
        self._begin()
        # What has just arrived is used only when its requests continue.
        return happened or self._make_room(usage)

    def add(self, loaded: LoadedAdapters, *, replaces: bool, digest: str, pinned: bool, usage: Usage) -> ServedAdapter:
        """By command: see `AdapterTable.add`. Raises `BusyError` for one to pin that has no place."""
        content = loaded.weights[0].digest
        if pinned and len(self.table.pinned - {content}) >= self.table.limit - 1:
            raise BusyError(
                f"{len(self.table.pinned)} adapters are pinned, --max-cpu-loras is {self.table.limit}: leave one "
                "place, or raise it"
            )
        idle = [each for each in self.idle(usage) if each != content] if self.loads.allowed else []
        later = self.loads.allowed and not pinned
        adapter = self.table.add(loaded, replaces=replaces, digest=digest, idle=idle, later=later)
        self.table.measure(loaded)
        self._failed.loaded(adapter.name, content)
        if pinned:
            self.table.pinned.add(content)
        else:
            self.table.pinned.discard(content)
        return adapter

    def idle(self, usage: Usage) -> list[bytes]:
        """Adapters in memory that no request has and that may make way, the least recently used first."""
        used = usage.computing.keys() | usage.waiting.keys()
        return [digest for digest in self._movable() if digest not in used]

    def _folder_of(self, ref: AdapterRef) -> str:
        """ "" if it cannot be loaded. A request may name folders in the folder of adapters alone."""
        if not self.loads.allowed:
            return ""
        return self.table.folder_of(ref.digest) or (ref.source if self.config.folder else "")

    def _movable(self) -> list[bytes]:
        return [digest for digest in self.table.resident if digest not in self.table.pinned]

    def _room(self) -> int:
        loading = sum(each.loading is not None for each in self._wanted.values())
        return self.table.limit - len(self.table.slots) - loading

    def _arrived(self) -> Iterator[Loaded]:
        for digest, wanted in self._wanted.items():
            if digest in self.table.slots:
                # One that was unloaded in the meantime serves those that waited for it already.
                if digest not in self.table.leaving:
                    yield Loaded(digest)
            elif wanted.loading is not None and wanted.loading.done() and len(self.table.slots) < self.table.limit:
                yield self._finish(wanted, wanted.loading)

    def _finish(self, wanted: _Wanted, loading: "Future[LoadedAdapters]") -> Loaded:
        digest = wanted.ref.digest
        try:
            loaded = loading.result()
            self._require_content(wanted, loaded)
        except EngineError as error:
            self.failures_total += 1
            reason = f"adapter {wanted.ref.name!r} cannot be loaded here: {error}"
            self._failed.note(wanted.ref, reason, now=self.clock.now())
            logger.warning(reason, extra={"fields": {"adapter": wanted.ref.name, "digest": digest.hex()}})
            return Loaded(digest, AdapterMissingError(reason))
        self.table.measure(loaded)
        self.table.bring(loaded)
        self._failed.loaded(wanted.ref.name, digest)
        self._turns[digest] = self.clock.now()
        self.loads_total += 1
        self.load_s_total += loaded.seconds
        return Loaded(digest)

    def _require_content(self, wanted: _Wanted, loaded: LoadedAdapters) -> None:
        """Raise `ConfigError` where the folder has other content than the request."""
        [weights] = loaded.weights
        if weights.digest != wanted.ref.digest:
            raise ConfigError(
                f"the content of {wanted.folder!r} has the digest {weights.digest.hex()}, and not "
                f"{wanted.ref.digest.hex()}, with which it was registered: load it again with load_inplace"
            )

    def _begin(self) -> None:
        room = self._room()
        for digest, wanted in self._wanted.items():
            if room <= 0:
                return
            if wanted.loading is None and digest not in self.table.slots:
                wanted.loading = self._load(wanted)
                room -= 1

    def _load(self, wanted: _Wanted) -> "Future[LoadedAdapters]":
        try:
            return self.loads.begin(wanted.ref.name, wanted.folder)
        except EngineError as error:
            # A name or path that no adapter can have.
            failed: Future[LoadedAdapters] = Future()
            failed.set_exception(error)
            return failed

    def _make_room(self, usage: Callable[[], Usage]) -> list[Loaded | MakesWay]:
        now = self.clock.now()
        waiting = [each for each in self._wanted.values() if each.loading is None or each.loading.done()]
        if not waiting:
            return []
        fits = len(self.table.slots) <= self.table.limit
        if fits and all(each.ref.digest in self.table.leaving for each in waiting):
            # What it was to make way for is wanted no more.
            for each in waiting:
                self.table.stay(each.ref.digest)
            return []
        overdue = self._overdue(now)
        lacking = len(waiting) - max(0, self._room()) - len(self.table.leaving)
        if lacking <= 0:
            return overdue
        used = usage()
        unused = self.idle(used)[:lacking]
        ripe = sum(now - each.since >= self.config.turn_s for each in waiting[: lacking - len(unused)])
        busy = [digest for digest in self._movable() if digest not in unused and self._had_its_turn(digest, now)]
        busy.sort(key=lambda digest: (used.computing[digest], used.waiting[digest]))
        return overdue + [self._leave(digest, now) for digest in (*unused, *busy[:ripe])]

    def _had_its_turn(self, digest: bytes, now: float) -> bool:
        return now - self._turns.get(digest, -self.config.turn_s) >= self.config.turn_s

    def _overdue(self, now: float) -> list[Loaded | MakesWay]:
        """Those that have been computing for too long although they are to make way."""
        self._left = {digest: since for digest, since in self._left.items() if digest in self.table.leaving}
        late = [digest for digest, since in self._left.items() if now - since >= MAX_TURNS * self.config.turn_s]
        for digest in late:
            self._left[digest] = now
        return [MakesWay(digest, at_once=True) for digest in late]

    def _leave(self, digest: bytes, now: float) -> MakesWay:
        self.table.make_way(digest)
        self._turns.pop(digest, None)
        self._left[digest] = now
        self.evictions_total += 1
        return MakesWay(digest)


def make_shelf(
    loaded: LoadedModel, config: AdapterConfig, table: AdapterTable, clock: Clock, agreement: Agreement
) -> LoadingShelf:
    """For the engine around `loaded`, whose adapters are in `table`. `clock` is what ranks agree on."""
    loads = AdapterLoads(
        table=table,
        config=config,
        base=loaded.model_config,
        dtype=loaded.dtype,
        device=loaded.config.device,
        group=loaded.parallel.forward,
        agreement=agreement,
        keeps_halves=reads_halves(loaded.model),
    )
    return LoadingShelf(table=table, loads=loads, clock=clock)
