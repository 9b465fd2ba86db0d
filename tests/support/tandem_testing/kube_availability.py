"""How many pods of each part were ready, at the worst moment, while something was done to a service."""

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from tandem_operator.builders.naming import ROLE_LABEL
from tandem_testing.control_plane import Manifest
from tandem_testing.kube_services import Services

POLL_S = 0.05
READY = {"type": "Ready", "status": "True"}


def is_ready(pod: Manifest) -> bool:
    """Ready, and not about to go."""
    conditions = pod["status"].get("conditions", ())
    return "deletionTimestamp" not in pod["metadata"] and any(READY.items() <= one.items() for one in conditions)


@dataclass
class Availability:
    """Make it with `watched`."""

    services: Services
    fewest: dict[str, int] = field(default_factory=dict)
    """By role of workers, and for gateway."""

    def look(self) -> None:
        """Once."""
        ready: Counter[str] = Counter(dict.fromkeys(self.fewest, 0))
        for component in ("worker", "gateway"):
            pods = self.services.pods(component)
            ready.update(pod["metadata"]["labels"].get(ROLE_LABEL, component) for pod in pods if is_ready(pod))
        self.fewest = {part: min(count, self.fewest.get(part, count)) for part, count in ready.items()}


@contextmanager
def watched(services: Services) -> Iterator[Mapping[str, int]]:
    """Looks all the time that the block lasts."""
    ended, seen = threading.Event(), Availability(services)
    seen.look()

    def look() -> None:
        while not ended.wait(POLL_S):
            seen.look()

    thread = threading.Thread(target=look, name="availability")
    thread.start()
    fewest: dict[str, int] = {}
    try:
        yield fewest
    finally:
        ended.set()
        thread.join()
        fewest |= seen.fewest
