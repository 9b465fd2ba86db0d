"""The beginning of a reconciliation of a ModelGateway or a ModelCache, whose objects garbage collection deletes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

from tandem_operator.controller.store import Seen, ServiceKey, Status, Store, generation_of, status_as


@dataclass(frozen=True, slots=True)
class Root(Generic[Status]):
    """An object that stays, with the status that it has."""

    seen: Seen
    before: Status
    generation: int


def root_of(
    store: Store, key: ServiceKey, form: type[Status], forget: Callable[[ServiceKey], None]
) -> Root[Status] | None:
    """None while it is being deleted and, after `forget`, once it is gone. `form`: of its status."""
    seen = store.service(key)
    if seen is None:
        forget(key)
    if seen is None or seen.deleting:
        return None
    return Root(seen, status_as(seen, form), generation_of(seen))
