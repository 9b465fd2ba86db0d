"""A worker as the price formula sees it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tandem_services.router.choice import WorkerView
from tandem_services.router.cost import Load


@dataclass(frozen=True, kw_only=True, slots=True)
class PricedFetch:
    """A cached prefix that another worker would send before this one computes."""

    source: WorkerView
    tokens: int
    """Of the prompt, that the source has cached."""
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One worker that may serve."""

    view: WorkerView
    load: Load
    matched: int
    """Prompt tokens in its prefix cache, in device or host memory."""
    in_host: int = 0
    """Of them, those in host memory alone."""
    in_flight: int = 0
    """Of `matched`, those that a prompt in flight will leave there. They are not computed again, and not fetched."""
    links: Mapping[str, float] = field(default_factory=dict)
    """Bytes per second of its writes by the receiver's incarnation; 0 for a broken link."""
    fetch: PricedFetch | None = None
    """What it had better fetch if it computes the prompt."""

    @property
    def held(self) -> int:
        """Prompt tokens in its prefix cache now."""
        return self.matched - self.in_flight

    @property
    def known(self) -> int:
        """Prompt tokens that it need not compute."""
        return self.matched if self.fetch is None else self.fetch.tokens

    @property
    def fetched(self) -> int:
        """Of them, those that come from another worker."""
        return self.known - self.matched
