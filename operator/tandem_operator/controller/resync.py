"""Full lists of everything that is watched: at the start, after gaps of a watch, and every few minutes.

Watches tell what changes while they are connected. An object that goes while one is not is never told of; it is found
here. Then every service is looked at, for what no watch tells of, such as a Secret that is gone.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from tandem_operator.builders.naming import SERVICE_LABEL
from tandem_operator.controller.cluster import ApiError, Cluster
from tandem_operator.controller.kinds import MODEL_SERVICE, Kind, ServiceKey
from tandem_operator.controller.objects import Seen
from tandem_operator.controller.store import Store

logger = logging.getLogger(__name__)

EVERY_S = 300.0
SOON_S = 5.0
"""After a gap: several watches break together."""
RETRY_S = 5.0


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
        self.synced = asyncio.Event()

    def soon(self) -> None:
        """A watch has begun anew: something may have been missed."""
        self._wanted.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                await self.once()
                self._wanted.clear()
            except ApiError as error:
                logger.warning("objects could not be listed: %s", error)
                await asyncio.sleep(RETRY_S)
                continue
            try:
                async with asyncio.timeout(EVERY_S):
                    await self._wanted.wait()
                await asyncio.sleep(SOON_S)
            except TimeoutError:
                logger.debug("time for a full list")

    async def once(self) -> None:
        """Raises `ApiError` when the API server does not answer."""
        for kind in self._kinds:
            for namespace in self._places:
                items, version = await self._cluster.list_all(kind, namespace, selector_for(kind))
                news = self._store.replace(kind, namespace, map(Seen.of, items), version)
                for seen in news:
                    self._changed(seen.key)
        for service in self._store.services():
            self._changed(service.key)
        self.synced.set()
