"""What is known of the cluster: the newest version of each object that concerns us, by the service it belongs to.

    events of kopf's watches ─┐
    answers to our own writes ├─▶ Store ─▶ view of one service ─▶ Observed
    full lists (`resync`)    ─┘

Older versions never replace newer ones, so the three may arrive in any order, and a reconcile sees what the one before
it has written. What a watch has missed (it was interrupted, the object went meanwhile) the next full list puts right.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

from tandem_operator.controller.kinds import MODEL_SERVICE, Kind, ServiceKey
from tandem_operator.controller.objects import Seen
from tandem_operator.planning.observed import Ref

TOMBSTONE_S = 600.0
"""An object that is gone is remembered so long: older news of it that comes late does not bring it back."""


class _Tombstone(NamedTuple):
    version: int
    """As of which it was gone."""
    at: float


class Store:
    """Objects by service; `clock` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._services: dict[ServiceKey, Seen] = {}
        self._parts: defaultdict[ServiceKey, dict[Ref, Seen]] = defaultdict(dict)
        self._by_uid: dict[str, Seen] = {}
        self._gone: dict[str, _Tombstone] = {}

    def put(self, seen: Seen) -> bool:
        """Whether it was news."""
        tombstone = self._gone.get(seen.uid)
        if tombstone is not None and seen.version <= tombstone.version:
            return False
        # What a watch calls gone may only have lost our label, and have it again.
        self._gone.pop(seen.uid, None)
        old = self._by_uid.get(seen.uid)
        if old is not None:
            if old.version >= seen.version:
                return False
            # Its label may have moved it to another service.
            self._take_out(old)
        self._by_uid[seen.uid] = seen
        if seen.ref.kind == MODEL_SERVICE.name:
            self._services[seen.key] = seen
        else:
            self._parts[seen.key][seen.ref] = seen
        return True

    def drop(self, seen: Seen) -> None:
        """It is gone as of its version. Another object that has its name meanwhile stays."""
        self._bury(seen, seen.version)

    def _bury(self, seen: Seen, version: int) -> None:
        self._gone[seen.uid] = _Tombstone(version, self._clock())
        old = self._by_uid.pop(seen.uid, None)
        if old is not None:
            self._take_out(old)

    def replace(self, kind: Kind, namespace: str | None, listed: Iterable[Seen], version: int) -> list[Seen]:
        """All of one kind as a list of that version has them. What has changed or is gone."""
        current = {seen.uid: seen for seen in listed}
        news = [seen for seen in current.values() if self.put(seen)]
        known = [seen for seen in self._by_uid.values() if seen.ref.kind == kind.name]
        for seen in known:
            if namespace in (None, seen.namespace) and seen.uid not in current and seen.version <= version:
                self._bury(seen, version)
                news.append(seen)
        self._forget_the_dead()
        return news

    def service(self, key: ServiceKey) -> Seen | None:
        return self._services.get(key)

    def services(self) -> list[Seen]:
        return list(self._services.values())

    def parts(self, key: ServiceKey) -> list[Seen]:
        """Objects that name this service in their labels, whoever owns them."""
        return list(self._parts.get(key, {}).values())

    def _take_out(self, seen: Seen) -> None:
        if self._services.get(seen.key) is seen:
            del self._services[seen.key]
        parts = self._parts.get(seen.key, {})
        if parts.get(seen.ref) is seen:
            del parts[seen.ref]
            if not parts:
                del self._parts[seen.key]

    def _forget_the_dead(self) -> None:
        limit = self._clock() - TOMBSTONE_S
        self._gone = {uid: one for uid, one in self._gone.items() if one.at > limit}
