"""kopf watches the cluster: it reconnects, logs in and shuts down; its handlers only record events.

There are no creating, updating or deleting handlers and no timers. kopf would store their progress in annotations of
the handled objects, which are writes, and they do not see the other objects of a service. Any event of any object of a
service leads to one reconciliation of the whole service (docs/adr/0025-kopf-watches.md).

`Resync` lists everything that is watched: at the start, after gaps of a watch, and every few minutes. A watch reports
changes only while it is connected; an object deleted in a gap is found here. Afterwards every service is reconciled,
for changes that no watch reports, such as a deleted Secret. A namespace without permissions, because it was deleted or
they are not granted yet, is skipped and retried. The others are served; its own services only after all of its objects
were listed.

`NoDifferences` and `NoProgress` disable kopf's own memory. By default kopf copies each object several times to compute
changes since the last successful handler. Event handlers do not use them, and the copies took half of the operator's
CPU time.
"""

import asyncio
import contextlib
import itertools
import logging
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import kopf

from tandem_operator.builders.naming import MANAGED
from tandem_operator.controller.cluster import ApiError, Cluster
from tandem_operator.controller.store import MODEL_ADAPTER, ROOTS, Kind, Seen, ServiceKey, Store

logger = logging.getLogger(__name__)
FORBIDDEN = 403
EVERY_S = 300.0

SOON_S = 5.0
"""After a gap: several watches break together."""

RETRY_S = 5.0

LEFT_OUT_S = 15.0
"""Until a namespace that was left out is tried again."""


def selector_for(kind: Kind) -> str:
    """Label selector of what concerns us of this kind: what the operator has created, and all that users write."""
    return "" if kind.name in (*ROOTS, MODEL_ADAPTER.name) else MANAGED


class Resync:
    """`run` it; `synced` is set once everything has been listed."""

    def __init__(
        self,
        cluster: Cluster,
        store: Store,
        kinds: Sequence[Kind],
        namespaces: Sequence[str],
        changed: Callable[[ServiceKey], None],
    ) -> None:
        self._cluster = cluster
        self._store = store
        self._kinds = kinds
        self._places: list[str | None] = list(namespaces) or [None]
        self._changed = changed
        self._wanted = asyncio.Event()
        self._listed: set[str | None] = set()
        self._left_out: set[str | None] = set()
        self.synced = asyncio.Event()

    def knows(self, key: ServiceKey) -> bool:
        """Whether everything of the service's namespace has been listed."""
        return not self._listed.isdisjoint((None, key.namespace))

    def soon(self) -> None:
        """A watch was restarted: something may have been missed."""
        self._wanted.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                await self.once()
                self._wanted.clear()
                await self._until_next()
            except ApiError as error:
                logger.warning("cannot list objects: %s", error)
                await asyncio.sleep(RETRY_S)

    async def _until_next(self) -> None:
        """Waits for a reason to list everything. Raises `ApiError` as `once` does."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EVERY_S):
                while not self._wanted.is_set():
                    await self._wait(LEFT_OUT_S if self._left_out else EVERY_S)
                    await self._list(list(self._left_out))
                await asyncio.sleep(SOON_S)

    async def _wait(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wanted.wait()

    async def once(self) -> None:
        """Raises `ApiError` when the API server does not answer, or refuses all namespaces."""
        await self._list(self._places)
        self.synced.set()

    async def _list(self, places: Sequence[str | None]) -> None:
        refused: ApiError | None = None
        for namespace in places:
            try:
                await self._list_place(namespace)
            except ApiError as error:
                if error.status != FORBIDDEN:
                    raise
                refused = error
                if namespace not in self._left_out:
                    logger.warning("skipping namespace %s until it can be listed: %s", namespace, error)
                self._left_out.add(namespace)
        if refused is not None and not self._listed:
            raise refused

    async def _list_place(self, namespace: str | None) -> None:
        for kind in self._kinds:
            items, version = await self._cluster.list_all(kind, namespace, selector_for(kind))
            news = self._store.replace(kind, namespace, map(Seen.of, items), version)
            for seen in news:
                self._changed(seen.key)
        self._listed.add(namespace)
        self._left_out.discard(namespace)
        for service in self._store.roots():
            if namespace in (None, service.namespace):
                self._changed(service.key)


class NoDifferences(kopf.DiffBaseStorage):
    """Every object is as it was."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence({})

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        """Nothing is written to objects."""


class NoProgress(kopf.ProgressStorage):
    """No handler is ever under way."""

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        """Nothing is written to objects."""

    def purge(self, **_: Any) -> None:
        """Nothing was."""

    def touch(self, **_: Any) -> None:
        """No daemon waits for it."""

    def clear(self, *, essence: kopf.BodyEssence) -> kopf.BodyEssence:
        return essence


EventHandler = Callable[[str, str | None, Any], None]
"""Called with kind, type of event (None: listed, not changed) and body."""


class EndlessBackoff:
    """Pauses between attempts to reach the API server: never given up, and never longer than it takes to notice that
    it is back [api-server-absent]."""

    def __iter__(self) -> Iterator[float]:
        rising = (0.5 * 2.0**attempt for attempt in range(4))
        return (pause * random.uniform(0.75, 1.25) for pause in itertools.chain(rising, itertools.repeat(8.0)))


def registry_for(
    kinds: Sequence[Kind],
    on_event: EventHandler,
    start: Callable[[], Awaitable[None]],
    stop: Callable[[], Awaitable[None]],
) -> kopf.OperatorRegistry:
    """Handlers of one operator. `start` and `stop`: what runs in parallel to the watches."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        # By the official client, as our own requests: the pod's account or a kubeconfig, with whatever plugin that
        # names.
        return kopf.login_via_client(**kwargs)

    @kopf.on.startup(registry=registry)
    async def startup(settings: kopf.OperatorSettings, **_: Any) -> None:
        configure(settings, kinds)
        await start()

    @kopf.on.cleanup(registry=registry)
    async def cleanup(**_: Any) -> None:
        await stop()

    for kind in kinds:
        _watch(registry, kind, on_event)
    return registry


def _watch(registry: kopf.OperatorRegistry, kind: Kind, on_event: EventHandler) -> None:
    @kopf.on.event(kind.group, kind.version, kind.plural, id=f"on_event-{kind.plural}", registry=registry)
    async def event(type: str | None, body: kopf.Body, **_: Any) -> None:  # noqa: A002 - kopf's name
        on_event(kind.name, type, body)


def configure(settings: kopf.OperatorSettings, kinds: Sequence[Kind]) -> None:
    """kopf's settings."""
    # Events about services are ours (`events`), and so is leadership (`election`).
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.persistence.diffbase_storage = NoDifferences()
    settings.persistence.progress_storage = NoProgress()
    # Namespaces and kinds are given; nothing has to be watched to find them.
    settings.scanning.disabled = True
    settings.networking.error_backoffs = EndlessBackoff()
    settings.networking.connect_timeout = 10.0
    settings.networking.request_timeout = 60.0
    settings.watching.chunk_size = 500
    settings.process.ultimate_exiting_timeout = 60.0
    for kind in kinds:
        selector = selector_for(kind)
        if selector:
            settings.watching.label_selectors[kind.group, kind.version, kind.plural] = selector
