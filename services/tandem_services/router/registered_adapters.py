"""Adapters that the gateways of a deployment have registered, for workers that start later.

    entry      name ─▶ digest, folder, size; signed. The one with the higher revision holds
    removed    an entry that marks this, kept for `REMOVED_S`: a gateway that missed it would write the old one again.
               Of `MAX_NAMES` the oldest makes way for a name that is registered
    sync       every heartbeat: take what is newer in Redis, write what is newer here
    reported   names of workers' flags, beside them: for gateways that start while there are no workers
    announced  names that are expected, without content yet

Each gateway keeps all entries in memory, so a Redis that is away, or has lost its data, changes nothing: gateways write
them again. What no process of the deployment has signed is overwritten or removed. An old entry that is written
again has an old revision; only a gateway without a newer one takes it.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Annotated

import msgspec

from tandem_engine.messages.control import ServedAdapter
from tandem_services.common.redis_client import RedisUnavailableError
from tandem_services.router.deployment import Deployment
from tandem_services.router.keys import Keys
from tandem_services.router.redis_functions import FunctionLibrary

REMOVED_S = 7 * 86_400.0
MAX_NAMES = 1024
"""Of one model, removed ones included. Removed ones make way; beyond the others no further name is registered."""

MAX_TEXT = 8192

MAX_FOLDER = 4096

MAX_REPORTED = 256
"""Names of workers' flags of one model, as many as a worker reports."""

MAX_REPORTED_TEXT = 4096
"""More than a name and a folder of which JSON escapes each character."""


MAX_ANNOUNCED = 256
"""Names that are expected of one model, as many as the status of a service lists."""

MAX_ADAPTER_NAME = 128

MAX_ANNOUNCED_TEXT = 1 << 18
"""More than so many names of which JSON escapes each character."""


class RegisteredAdapter(ServedAdapter, frozen=True, kw_only=True):
    """What a name stands for, whatever workers there are."""

    source: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_FOLDER)]
    """Folder, in the `--lora-dir` of workers."""
    revision: Annotated[int, msgspec.Meta(ge=1, le=2**53)]
    at: float
    """Unix time of the command."""
    removed: bool = False

    @property
    def order(self) -> tuple[int, bool, str]:
        """Of two entries of one name the greater one holds, at all gateways."""
        return self.revision, self.removed, self.digest + self.source


class _Reply(msgspec.Struct, frozen=True, kw_only=True):
    entries: tuple[msgspec.Raw, ...]


_ENTRY = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
_HEADERS = {0xD9: 2, 0xDA: 3, 0xDB: 5}
"""Bytes before those of a text in msgpack, by the first one; 1 for short ones."""


def _bytes_of(text: msgspec.Raw) -> bytes:
    data = bytes(text)
    return data[_HEADERS.get(data[0], 1) :]


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterBoard:
    """The entries in Redis. Raises `RedisUnavailableError`."""

    library: FunctionLibrary
    keys: Keys

    async def sync(self, changes: Iterable[tuple[str, str, str]] = ()) -> dict[str, str]:
        """All texts by field. `changes`: field, text as it was read, new text; see scripts/adapters.lua.

        Bytes that are no text are surrogates in it, so that they can be replaced, too.
        """
        args = [part.encode("utf-8", "surrogateescape") for change in changes for part in change]
        reply = await self.library.ask("sync_adapters", (self.keys.adapters,), *args, shape=_Reply)
        found = {}
        for raw in reply.entries:
            try:
                name, text = _ENTRY.decode(raw)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue  # its bytes are no key of ours: a gateway overwrites nothing that it cannot read
            found[name] = _bytes_of(text).decode("utf-8", "surrogateescape")
        return found


@dataclass(kw_only=True, slots=True)
class ReportedAdapters:
    """Adapters of the flags of workers, of one model, as one gateway has them. Belongs to its event loop.

    A gateway with workers in its view writes what their names stand for. One that has seen no worker since its start
    reads it: clients may name these adapters, and their requests wait for a worker.
    """

    model: str
    deployment: Deployment
    _seen: dict[str, ServedAdapter] | None = None
    """Of workers; None before this gateway has seen any."""
    _read: dict[str, ServedAdapter] = field(default_factory=dict)
    """Of what other gateways have written."""

    def note(self, adapters: Mapping[str, ServedAdapter]) -> None:
        """What the workers have now, by name."""
        self._seen = dict(sorted(adapters.items())[:MAX_REPORTED])

    def all(self) -> Mapping[str, ServedAdapter]:
        """By name."""
        return self._read if self._seen is None else self._seen

    def merge(self, texts: Mapping[str, str]) -> list[tuple[str, str, str]]:
        """Take what is in Redis; returns what to change there (`AdapterBoard.sync`)."""
        # No registered name has a colon, so gateways take these fields for none of theirs.
        prefix = f"{self.model}:\x00:"
        before = {each.removeprefix(prefix): text for each, text in texts.items() if each.startswith(prefix)}
        if self._seen is None:
            # Read first: what no process of this deployment has written takes no place.
            found = ((name, self._decoded(name, text)) for name, text in sorted(before.items()))
            signed = ((name, adapter) for name, adapter in found if adapter is not None)
            self._read = dict(islice(signed, MAX_REPORTED))
            return []
        changes = [(prefix + name, text, "") for name, text in before.items() if name not in self._seen]
        for name, adapter in self._seen.items():
            text = before.get(name, "")
            # Whatever else a later release has written there stays.
            if self._decoded(name, text) != adapter and (after := self._text(adapter)) != text:
                changes.append((prefix + name, text, after))
        return changes

    def _text(self, adapter: ServedAdapter) -> str:
        content = msgspec.json.encode(adapter, order="deterministic").decode()
        return f"{self.deployment.reported_adapter_proof(self.model, content)} {content}"

    def _decoded(self, name: str, text: str) -> ServedAdapter | None:
        """None for what no process of this deployment has written for this name."""
        proof, _, content = text.partition(" ")
        try:
            if len(text) > MAX_REPORTED_TEXT or not self.deployment.reported_adapter(self.model, content, proof=proof):
                return None
            adapter = msgspec.json.decode(content, type=ServedAdapter)
        except (msgspec.DecodeError, UnicodeEncodeError):
            return None
        return adapter if adapter.name == name else None


class _Announced(msgspec.Struct, frozen=True, kw_only=True):
    names: Annotated[
        tuple[Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_ADAPTER_NAME)], ...],
        msgspec.Meta(max_length=MAX_ANNOUNCED),
    ] = ()
    revision: Annotated[int, msgspec.Meta(ge=0, le=2**53)] = 0

    @property
    def order(self) -> tuple[int, tuple[str, ...]]:
        """The greater of two holds, at all gateways."""
        return self.revision, self.names


@dataclass(kw_only=True, slots=True)
class AnnouncedAdapters:
    """Names that a model is expected to have, although no worker has read these adapters yet, as one gateway has them.
    Belongs to its event loop.

    The operator announces what the spec of a service lists. A service at zero has no worker that could read an adapter,
    so the name stands for nothing yet; but a request of it may wait, which starts a worker. Once a worker is ready the
    name is registered. Gateways share one signed entry, of which the one with the higher revision holds.
    """

    model: str
    deployment: Deployment
    now: Callable[[], float] = time.time
    _announced: _Announced = field(default_factory=_Announced)

    @property
    def names(self) -> tuple[str, ...]:
        """Sorted."""
        return self._announced.names

    def replace(self, names: Sequence[str]) -> None:
        """From now on these, at most `MAX_ANNOUNCED`, are announced, and no others."""
        revision = max(int(self.now()), self._announced.revision + 1)
        self._announced = _Announced(names=tuple(sorted(set(names))), revision=revision)

    def merge(self, texts: Mapping[str, str]) -> list[tuple[str, str, str]]:
        """Take what is newer in Redis; returns what to change there (`AdapterBoard.sync`)."""
        # No registered name has a colon, so gateways take this field for none of theirs.
        place = f"{self.model}:\x01:"
        before = texts.get(place, "")
        found = self._decoded(before)
        if found is not None and found.order >= self._announced.order:
            self._announced = found
            return []
        after = self._text() if self._announced.revision else ""
        return [(place, before, after)] if after != before else []

    def _text(self) -> str:
        content = msgspec.json.encode(self._announced, order="deterministic").decode()
        return f"{self.deployment.announced_adapters_proof(self.model, content)} {content}"

    def _decoded(self, text: str) -> _Announced | None:
        """None for what no process of this deployment has written."""
        proof, _, content = text.partition(" ")
        try:
            if len(text) > MAX_ANNOUNCED_TEXT or not self.deployment.announced_adapters(
                self.model, content, proof=proof
            ):
                return None
            return msgspec.json.decode(content, type=_Announced)
        except (msgspec.DecodeError, UnicodeEncodeError):
            return None


@dataclass(kw_only=True, slots=True)
class RegisteredAdapters:
    """Of one model, as this gateway has them. Belongs to its event loop."""

    model: str
    deployment: Deployment = field(default_factory=Deployment)
    board: AdapterBoard | None = None
    """None: this gateway has them for itself."""
    now: Callable[[], float] = time.time
    _entries: dict[str, RegisteredAdapter] = field(default_factory=dict)
    """By name, removed ones included."""
    reported: ReportedAdapters = field(init=False)
    """Names that no command has registered."""
    announced: AnnouncedAdapters = field(init=False)
    """Names that are expected."""

    def __post_init__(self) -> None:
        self.announced = AnnouncedAdapters(model=self.model, deployment=self.deployment, now=self.now)
        self.reported = ReportedAdapters(model=self.model, deployment=self.deployment)

    def note(self, adapters: Mapping[str, ServedAdapter]) -> None:
        """What names stand for at the workers that there are."""
        self.reported.note({name: each for name, each in adapters.items() if self.find(name) is None})

    def all(self) -> Mapping[str, RegisteredAdapter]:
        """By name."""
        return {name: entry for name, entry in self._entries.items() if not entry.removed}

    def find(self, name: str) -> RegisteredAdapter | None:
        entry = self._entries.get(name)
        return None if entry is None or entry.removed else entry

    def last_digest(self, name: str) -> str:
        """Of what the name stands for, or stood for when it was removed; "" for a name that is not known."""
        entry = self._entries.get(name)
        return "" if entry is None else entry.digest

    def has(self, digest: str) -> bool:
        """Whether a name stands for this content."""
        return any(entry.digest == digest for entry in self.all().values())

    @property
    def full(self) -> bool:
        """Whether no further name can be registered."""
        return len(self.all()) >= MAX_NAMES

    async def register(self, adapter: ServedAdapter, *, source: str) -> None:
        """From now on its name stands for it; in Redis too, as soon as that is there."""
        former = self._entries.get(adapter.name)
        if former is not None and not former.removed and (former.digest, former.source) == (adapter.digest, source):
            return
        entry = RegisteredAdapter(
            name=adapter.name,
            digest=adapter.digest,
            rank=adapter.rank,
            root=adapter.root,
            size=adapter.size,
            source=source,
            # Above that of a removed entry that has made way, which Redis may still have.
            revision=max(int(self.now()), 1 + (0 if former is None else former.revision)),
            at=self.now(),
        )
        if former is None:
            self._has_room(entry)
        self._entries[adapter.name] = entry
        await self.sync()

    async def announce(self, names: Sequence[str]) -> None:
        """These are expected from now on, and no others; in Redis too, as soon as that is there."""
        if sorted(set(names)) != [*self.announced.names]:
            self.announced.replace(names)
            await self.sync()

    async def remove(self, name: str) -> bool:
        """The name stands for nothing from now on. False if it was not registered."""
        former = self.find(name)
        if former is None:
            return False
        changed = msgspec.structs.replace(former, revision=former.revision + 1, at=self.now(), removed=True)
        self._entries[name] = changed
        await self.sync()
        return True

    async def sync(self) -> None:
        """Take over what is newer, and write what is newer here. Redis away: next time."""
        self._forget_removed()
        if self.board is None:
            return
        try:
            texts = await self.board.sync()
            changes = [*self._merge(texts), *self.reported.merge(texts), *self.announced.merge(texts)]
            if changes:
                self._merge(await self.board.sync(changes))
        except RedisUnavailableError:
            return

    def _merge(self, texts: Mapping[str, str]) -> list[tuple[str, str, str]]:
        """What to change in Redis."""
        prefix, changes, equal = f"{self.model}:", [], set[str]()
        for field_name, text in texts.items():
            if not field_name.startswith(prefix) or ":" in field_name.removeprefix(prefix):
                continue
            name = field_name.removeprefix(prefix)
            entry = self._read(name, text)
            if entry is None or self._is_over(entry):
                if name not in self._entries:
                    changes.append((field_name, text, ""))
            elif (known := self._entries.get(name)) is None:
                if self._has_room(entry):
                    self._entries[name] = entry
            elif entry.order > known.order:
                self._entries[name] = entry
            elif entry == known:
                equal.add(name)  # whatever else a later release has written there
        for name, entry in self._entries.items():
            if name in equal:
                continue
            before, after = texts.get(prefix + name, ""), self._text(entry)
            if before != after:
                changes.append((prefix + name, before, after))
        return changes

    def _text(self, entry: RegisteredAdapter) -> str:
        content = msgspec.json.encode(entry, order="deterministic").decode()
        return f"{self.deployment.adapter_proof(self.model, content)} {content}"

    def _read(self, name: str, text: str) -> RegisteredAdapter | None:
        """None for what no process of this deployment has written for this name."""
        proof, _, content = text.partition(" ")
        try:
            if len(text) > MAX_TEXT or not self.deployment.registered(self.model, content, proof=proof):
                return None
            entry = msgspec.json.decode(content, type=RegisteredAdapter)
        except (msgspec.DecodeError, UnicodeEncodeError):
            return None
        return entry if entry.name == name else None

    def _is_over(self, entry: RegisteredAdapter) -> bool:
        return entry.removed and self.now() - entry.at > REMOVED_S

    def _has_room(self, entry: RegisteredAdapter) -> bool:
        """For one of a name that is not known yet. An old removed one makes way for one that is not removed."""
        if len(self._entries) < MAX_NAMES:
            return True
        if entry.removed or self.full:
            return False
        removed = (each for each in self._entries.values() if each.removed)
        del self._entries[min(removed, key=lambda each: each.at).name]
        return True

    def _forget_removed(self) -> None:
        for name in [name for name, entry in self._entries.items() if self._is_over(entry)]:
            del self._entries[name]
