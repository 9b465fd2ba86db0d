"""Reading the load of one ModelService from its own pods, a look each period.

Prometheus is not asked: it need not be there, and what it has is as old as its last scrape.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic

import httpx

from tandem_operator.telemetry.fetching import fetch_figures
from tandem_operator.telemetry.looks import Looks, Seen
from tandem_operator.telemetry.pods import PodSeen


@dataclass(kw_only=True, slots=True)
class LoadReader:
    """One per ModelService. It remembers the last look, for rates."""

    client: httpx.AsyncClient
    now: Callable[[], float] = monotonic
    looks: Looks = field(default_factory=Looks)

    async def read(self, pods: Sequence[PodSeen]) -> Seen:
        """Ask all pods. Ends in time whatever they do; a pod that says nothing is no error but a reason."""
        answers = await fetch_figures(self.client, pods)
        return self.looks.take(self.now(), pods, answers)
