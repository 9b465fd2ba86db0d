"""The adapters of one running engine, which may change between two steps.

    1. open      new requests may have it
    2. closed    its last name is gone, or stands for another adapter: requests that have it run on, others are refused
       leaving   it makes way for another adapter: requests that compute continue, others wait until it is loaded again
    3. gone      no request has it, and no step that reads its weights is in flight: its slot is free

Names are those of the worker's report; requests bring digests. Of a digest in several names there is one copy. Adding
what a name stands for already changes nothing, so a command that was not answered may be sent again. A name stays when
its adapter leaves: the table keeps the folder, and to add it again brings it back.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Self

from tandem_engine.base.errors import AdapterMissingError, BusyError, CheckpointError, ConfigError
from tandem_engine.config.adapters import MAX_ADAPTERS
from tandem_engine.messages.control import ServedAdapter
from tandem_engine.model.adapters.loaded import LoadedAdapters
from tandem_engine.model.adapters.weights import AdapterWeights

MAX_UNLOADED = 32

FREE = AdapterWeights(digest=b"", rank=0, sites={})
"""In a slot without an adapter, so that the forward thread finds weights in each."""


@dataclass(kw_only=True, slots=True)
class AdapterTable:
    """Scheduler thread only, but for `weights`, of which the forward thread reads slots of launched steps."""

    limit: int
    """Adapters that are kept at a time, closed ones included; one more while a closed one makes room for the one that
    replaces it."""
    weights: list[AdapterWeights] = field(default_factory=list)
    """By slot."""
    slots: dict[bytes, int] = field(default_factory=dict)
    """By digest, of open and closed ones."""
    closed: set[bytes] = field(default_factory=set)
    """Digests that new requests cannot have."""
    leaving: set[bytes] = field(default_factory=set)
    """Digests that make way for others."""
    pinned: set[bytes] = field(default_factory=set)
    """Digests that never do."""
    unloaded: dict[bytes, None] = field(default_factory=dict)
    """Digests that no request may load again before a command does; the last `MAX_UNLOADED`."""
    changes: int = 0
    """Grows with each change of what is in memory, or of a name."""
    byte_s: float = 0.0
    """Seconds per byte of loads so far, the newest counting most; 0 before the first."""
    _folders: dict[bytes, str] = field(default_factory=dict)
    """Where adapters that have a name, or are in memory, were read."""
    _cached: dict[bytes, ServedAdapter] = field(default_factory=dict)
    """Those in memory, by digest, least recently used first."""
    _names: dict[str, ServedAdapter] = field(default_factory=dict)
    _fences: dict[bytes, int] = field(default_factory=dict)
    """Of closed ones that no request has any more: the newest step that may read their weights."""

    @classmethod
    def of(cls, loaded: LoadedAdapters, *, limit: int) -> Self:
        """With what was loaded together with the model."""
        table = cls(limit=limit)
        table.weights += loaded.weights
        table.slots.update(loaded.slots)
        table._names.update({adapter.name: adapter for adapter in loaded.served})
        table._folders.update(loaded.folders)
        table._cached.update({bytes.fromhex(adapter.digest): adapter for adapter in loaded.served})
        table.measure(loaded)
        return table

    @property
    def served(self) -> tuple[ServedAdapter, ...]:
        """Those that new requests may have."""
        return tuple(self._names.values())

    def names(self, digests: Collection[bytes]) -> tuple[str, ...]:
        """Of those with one of these contents, sorted."""
        named = {name for name, each in self._names.items() if bytes.fromhex(each.digest) in digests}
        return tuple(sorted(named | {each.name for digest, each in self._cached.items() if digest in digests}))

    @property
    def used(self) -> bool:
        """Whether there is any adapter, or a name of one."""
        return bool(self.slots or self._names)

    @property
    def resident(self) -> tuple[bytes, ...]:
        """Digests in memory that new requests have at once, least recently used first."""
        return tuple(digest for digest in self._cached if self.holds(digest))

    @property
    def mean_size(self) -> int:
        """Bytes of an adapter in memory."""
        sizes = [each.size for digest, each in self._cached.items() if digest in self.slots]
        return sum(sizes) // len(sizes) if sizes else 0

    def holds(self, digest: bytes) -> bool:
        """Whether new requests have it at once."""
        return digest in self.slots and digest not in self.closed and digest not in self.leaving

    def use(self, digest: bytes) -> None:
        """A request has this one, which is in memory: it is the last to make way."""
        self._cached[digest] = self._cached.pop(digest)

    def folder_of(self, digest: bytes) -> str:
        """Where an adapter that has a name, or is in memory, was read; "" for others."""
        return self._folders.get(digest, "")

    def bring(self, loaded: LoadedAdapters) -> None:
        """The one adapter of `loaded`, which a request needs, is in memory from now on, whatever names stand for."""
        [adapter], [weights] = loaded.served, loaded.weights
        assert weights.digest not in self.slots, f"adapter {adapter.name!r} is in memory already"
        self._place(weights, adapter)
        self._folders[weights.digest] = loaded.folders[weights.digest]
        if weights.digest in self.unloaded:
            self.closed.add(weights.digest)  # those that waited for it may have it, and no others

    def make_way(self, digest: bytes) -> None:
        """New requests of an adapter in memory wait from now on until it is loaded again."""
        self.leaving.add(digest)
        self.changes += 1

    def stay(self, digest: bytes) -> None:
        """It makes no way after all."""
        self.leaving.discard(digest)
        self._fences.pop(digest, None)
        self.changes += 1

    def measure(self, loaded: LoadedAdapters) -> None:
        """Note how long loading took."""
        size = sum(adapter.size for adapter in loaded.served)
        if size and loaded.seconds > 0.0:
            measured = min(loaded.seconds / size, 1.0)
            self.byte_s = (self.byte_s + measured) / 2 if self.byte_s else measured

    def add(
        self,
        loaded: LoadedAdapters,
        *,
        replaces: bool,
        digest: str = "",
        idle: Collection[bytes] = (),
        later: bool = False,
    ) -> ServedAdapter:
        """Serve the one adapter of `loaded` from the next step on. `digest`: the content that it is to have, if any.
        `idle`: adapters in memory that may make way for it, the least recently used first. `later`: without room its
        name alone is known, and the first request that needs it brings it in.

        Raises:
            CheckpointError: its content is another one.
            ConfigError: its name stands for other content, which is not to be replaced.
            BusyError: no further adapter fits, now, or no further name.
        """
        [adapter], [weights] = loaded.served, loaded.weights
        former = self._names.get(adapter.name)
        if former is not None and former.digest != adapter.digest and not replaces:
            raise ConfigError(f"lora_name: adapter {adapter.name!r} is loaded already: unload it, or replace it")
        if digest and adapter.digest != digest:
            raise CheckpointError(
                f"lora_path: the content of adapter {adapter.name!r} has the digest {adapter.digest} here, not "
                f"{digest}: give all workers the same files"
            )
        if former is not None and former.digest == adapter.digest and self.holds(weights.digest):
            self._folders[weights.digest] = loaded.folders[weights.digest]  # the same files may have moved
            return former
        if former is None and len(self._names) >= MAX_ADAPTERS:
            # Also of equal content: a worker's report has room for no more.
            raise BusyError(f"{MAX_ADAPTERS} adapters have a name, more are not reported: unload one")
        if weights.digest not in self.slots and self._makes_room(former, idle, later=later):
            self._place(weights, adapter)
        self.closed.discard(weights.digest)
        self.leaving.discard(weights.digest)
        self.unloaded.pop(weights.digest, None)
        self._fences.pop(weights.digest, None)
        self._names[adapter.name] = adapter
        self._folders[weights.digest] = loaded.folders[weights.digest]
        self.changes += 1
        if former is not None:
            self._close_unnamed(former)
        return adapter

    def remove(self, name: str, *, digest: str = "", cached: str = "") -> ServedAdapter:
        """Give `name` to no further request. `digest`: the content that it is to stand for, if any. `cached`: content
        that goes as well, unless another name stands for it.

        Raises:
            AdapterMissingError: no adapter of this name is here.
            ConfigError: the name stands for other content.
        """
        former = self._names.get(name)
        copy = self._forget_unnamed(bytes.fromhex(cached)) if cached and not self._names_of(cached) else None
        if former is None and copy is not None:
            return copy
        if former is None:
            raise AdapterMissingError(f"lora_name: no adapter {name[:80]!r} is loaded")
        if digest and former.digest != digest:
            raise ConfigError(f"lora_name: adapter {name!r} has the digest {former.digest}, not {digest}")
        del self._names[name]
        self._close_unnamed(former)
        return former

    def sweep(
        self, used: Iterable[bytes], *, launched: int, settled: int, having: Iterable[bytes] | None = None
    ) -> None:
        """Free the slots of adapters that close or leave and that neither a request has, nor a step that may be in
        flight. A closed one is kept for all requests, by `used`; one that leaves for those that do not wait for it,
        `having`, which are all if it is None."""
        if not self.closed and not self.leaving:
            return
        busy = set(used)
        busier = busy if having is None else set(having)
        for digest in [*self.closed, *(self.leaving - self.closed)]:
            if digest in (busy if digest in self.closed else busier):
                self._fences.pop(digest, None)
            elif settled >= self._fences.setdefault(digest, launched):
                self._free(digest)

    def _free(self, digest: bytes) -> None:
        self.weights[self.slots.pop(digest)] = FREE
        del self._cached[digest], self._fences[digest]
        if not self._names_of(digest.hex()):
            self._folders.pop(digest, None)
        self.closed.discard(digest)
        self.leaving.discard(digest)
        self.changes += 1

    def _makes_room(self, former: ServedAdapter | None, idle: Collection[bytes], *, later: bool) -> bool:
        """`former`: what the name of the new adapter stands for. Raises `BusyError` where there is no room, unless it
        may have some `later`."""
        problem = self._no_room(former, idle)
        if problem is not None and not later:
            raise BusyError(problem)
        return problem is None

    def _no_room(self, former: ServedAdapter | None, idle: Collection[bytes]) -> str | None:
        """Why none is there, or is about to be free."""
        if len(self.slots) < self.limit:
            return None
        frees = former is not None and bytes.fromhex(former.digest) in self.slots and self._names_of(former.digest) == 1
        if not frees and idle and len(self.slots) == self.limit:
            # Its memory is free when the steps in flight have ended.
            self.make_way(next(iter(idle)))
            return None
        if not frees:
            return f"{len(self.slots)} adapters are loaded, --max-cpu-loras is {self.limit}: unload one"
        if len(self.slots) > self.limit:
            return (
                f"{self.limit} adapters are loaded, as many as --max-cpu-loras allows, and another that was replaced "
                "still has requests: replace the next one when they have ended"
            )
        return None

    def _place(self, weights: AdapterWeights, adapter: ServedAdapter) -> None:
        self._cached[weights.digest] = adapter
        self.changes += 1
        free = next((slot for slot, held in enumerate(self.weights) if held is FREE), len(self.weights))
        if free == len(self.weights):
            self.weights.append(weights)
        else:
            self.weights[free] = weights
        self.slots[weights.digest] = free

    def _close_unnamed(self, former: ServedAdapter) -> None:
        self.changes += 1
        if not self._names_of(former.digest):
            self._forget_unnamed(bytes.fromhex(former.digest))

    def _forget_unnamed(self, digest: bytes) -> ServedAdapter | None:
        """No name stands for it: requests load it no more. Returns it if it is in memory."""
        self._folders.pop(digest, None)
        self.pinned.discard(digest)
        self.unloaded.pop(digest, None)
        self.unloaded[digest] = None
        while len(self.unloaded) > MAX_UNLOADED:
            del self.unloaded[next(iter(self.unloaded))]
        self.changes += 1
        if digest not in self.slots or digest in self.closed:
            return None
        self.leaving.discard(digest)
        self.closed.add(digest)
        return self._cached[digest]

    def _names_of(self, digest: str) -> int:
        return sum(adapter.digest == digest for adapter in self._names.values())
