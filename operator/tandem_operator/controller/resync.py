"""Full lists of everything that is watched: at the start, after gaps of a watch, and every few minutes.

Watches tell what changes while they are connected. An object that goes while one is not is never told of; it is found
here. Then every service is looked at, for what no watch tells of, such as a Secret that is gone.

A namespace whose rights are gone, because it was deleted or is not granted yet, is left out and tried again: the others
are served meanwhile, and its own services only after all of its objects were listed.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

from tandem_operator.builders.naming import SERVICE_LABEL
from tandem_operator.controller.cluster import ApiError, Cluster
from tandem_operator.controller.kinds import MODEL_SERVICE, Kind, ServiceKey
from tandem_operator.controller.objects import Seen
from tandem_operator.controller.store import Store

logger = logging.getLogger(__name__)

FORBIDDEN = 403

EVERY_S = 300.0
SOON_S = 5.0
"""After a gap: several watches break together."""
RETRY_S = 5.0
LEFT_OUT_S = 15.0
"""Until a namespace that was left out is tried again."""


def selector_for(kind: Kind) -> str:
    """Label selector of what concerns us of this kind: everything that belongs to a service, and all services."""
    return "" if kind is MODEL_SERVICE else SERVICE_LABEL


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
        """A watch has begun anew: something may have been missed."""
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
        for service in self._store.services():
            if namespace in (None, service.namespace):
                self._changed(service.key)
