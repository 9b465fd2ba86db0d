"""The adapters of one running engine, which may change between two steps.

    1. open      new requests may have it
    2. closed    its last name is gone, or stands for another adapter: requests that have it run on, others are refused
    3. gone      no request has it, and no step that reads its weights is in flight: its slot is free

Names are those of the worker's report; requests bring digests. Of a digest in several names there is one copy. Adding
what a name stands for already changes nothing, so a command that was not answered may be sent again.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Self

from tandem_engine.base.errors import AdapterMissingError, BusyError, CheckpointError, ConfigError
from tandem_engine.config.adapters import MAX_ADAPTERS
from tandem_engine.messages.control import ServedAdapter
from tandem_engine.model.adapters.loaded import LoadedAdapters
from tandem_engine.model.adapters.weights import AdapterWeights

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
        return table

    @property
    def served(self) -> tuple[ServedAdapter, ...]:
        """Those that new requests may have."""
        return tuple(self._names.values())

    def names(self, digests: Collection[bytes]) -> tuple[str, ...]:
        """Of those with one of these contents, sorted."""
        return tuple(sorted(name for name, each in self._names.items() if bytes.fromhex(each.digest) in digests))

    def add(self, loaded: LoadedAdapters, *, replaces: bool, digest: str = "") -> ServedAdapter:
        """Serve the one adapter of `loaded` from the next step on. `digest`: the content that it is to have, if any.

        Raises:
            CheckpointError: its content is another one.
            ConfigError: its name stands for other content, which is not to be replaced.
            BusyError: no further adapter fits.
        """
        [adapter], [weights] = loaded.served, loaded.weights
        if digest and adapter.digest != digest:
            raise CheckpointError(
                f"lora_path: the content of adapter {adapter.name!r} has the digest {adapter.digest} here, not "
                f"{digest}: give all workers the same files"
            )
        former = self._names.get(adapter.name)
        if former is not None and former.digest == adapter.digest:
            return former
        if former is not None and not replaces:
            raise ConfigError(f"lora_name: adapter {adapter.name!r} is loaded already: unload it, or replace it")
        if former is None and len(self._names) >= MAX_ADAPTERS:
            # Also of equal content: a worker's report has room for no more.
            raise BusyError(f"{MAX_ADAPTERS} adapters have a name, more are not reported: unload one")
        if weights.digest not in self.slots:
            self._require_room(former)
            self._place(weights)
        self.closed.discard(weights.digest)
        self._fences.pop(weights.digest, None)
        self._names[adapter.name] = adapter
        if former is not None:
            self._close_unnamed(former)
        return adapter

    def remove(self, name: str, *, digest: str = "") -> ServedAdapter:
        """Give `name` to no further request. `digest`: the content that it is to stand for, if any.

        Raises:
            AdapterMissingError: no adapter of this name is here.
            ConfigError: the name stands for other content.
        """
        former = self._names.get(name)
        if former is None:
            raise AdapterMissingError(f"lora_name: no adapter {name[:80]!r} is loaded")
        if digest and former.digest != digest:
            raise ConfigError(f"lora_name: adapter {name!r} has the digest {former.digest}, not {digest}")
        del self._names[name]
        self._close_unnamed(former)
        return former

    def sweep(self, used: Iterable[bytes], *, launched: int, settled: int) -> None:
        """Free the slots of closed adapters that neither a request has, by `used`, nor a step that may be in flight."""
        if not self.closed:
            return
        busy = set(used)
        for digest in [*self.closed]:
            if digest in busy:
                self._fences.pop(digest, None)
            elif settled >= self._fences.setdefault(digest, launched):
                self.weights[self.slots.pop(digest)] = FREE
                self.closed.discard(digest)
                del self._fences[digest]

    def _require_room(self, former: ServedAdapter | None) -> None:
        """`former`: what the name of the new adapter stands for. Raises `BusyError`."""
        if len(self.slots) < self.limit:
            return
        if former is None or self._names_of(former.digest) > 1:
            raise BusyError(f"{len(self.slots)} adapters are loaded, --max-cpu-loras is {self.limit}: unload one")
        if len(self.slots) > self.limit:
            raise BusyError(
                f"{self.limit} adapters are loaded, as many as --max-cpu-loras allows, and another that was replaced "
                "still has requests: replace the next one when they have ended"
            )

    def _place(self, weights: AdapterWeights) -> None:
        free = next((slot for slot, held in enumerate(self.weights) if held is FREE), len(self.weights))
        if free == len(self.weights):
            self.weights.append(weights)
        else:
            self.weights[free] = weights
        self.slots[weights.digest] = free

    def _close_unnamed(self, former: ServedAdapter) -> None:
        if not self._names_of(former.digest):
            self.closed.add(bytes.fromhex(former.digest))

    def _names_of(self, digest: str) -> int:
        return sum(adapter.digest == digest for adapter in self._names.values())
