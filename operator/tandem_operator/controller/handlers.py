"""kopf's part: it watches, reconnects, logs in and ends; what its handlers do is to note what they heard.

There are no creating, updating or deleting handlers and no timers: those of kopf keep their progress in annotations
of the objects that they handle, which are writes, and know nothing of the other objects of a service. One look at the
whole service follows from any event of any of its objects (docs/adr/0025-kopf-watches.md).
"""

import itertools
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import kopf

from tandem_operator.controller.kinds import Kind
from tandem_operator.controller.resync import selector_for
from tandem_operator.controller.stateless import NoDifferences, NoProgress

Heard = Callable[[str, str | None, Any], None]
"""Called with kind, type of event (None: listed, not changed) and body."""


class EndlessBackoff:
    """Pauses between attempts to reach the API server: never given up, and never longer than it takes to notice that
    it is back [api-server-absent]."""

    def __iter__(self) -> Iterator[float]:
        rising = (0.5 * 2.0**attempt for attempt in range(4))
        return (pause * random.uniform(0.75, 1.25) for pause in itertools.chain(rising, itertools.repeat(8.0)))


def registry_for(
    kinds: Sequence[Kind], heard: Heard, start: Callable[[], Awaitable[None]], stop: Callable[[], Awaitable[None]]
) -> kopf.OperatorRegistry:
    """Handlers of one operator. `start` and `stop`: what runs beside the watches."""
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
        _watch(registry, kind, heard)
    return registry


def _watch(registry: kopf.OperatorRegistry, kind: Kind, heard: Heard) -> None:
    @kopf.on.event(kind.group, kind.version, kind.plural, id=f"heard-{kind.plural}", registry=registry)
    async def event(type: str | None, body: kopf.Body, **_: Any) -> None:  # noqa: A002 - kopf's name
        heard(kind.name, type, body)


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
