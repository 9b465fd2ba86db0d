"""All pods' figures as one `Load`.

A sequence on a decode worker has a place, or waits for its KV and will have one. One that a worker is to give away
counts where it will be: it runs, and its worker is none of decode's. What gateways hold back waits for both roles.

While no gateway answers anybody, workers have nothing to do that counts: a canary that has just run is in their last
reports, and would keep a service from ever being idle.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from tandem_operator.scaling.load import DecodeLoad, Load, PrefillLoad
from tandem_operator.telemetry.demand import Rates
from tandem_operator.telemetry.figures import GatewayFigures, WorkerFigures


@dataclass(kw_only=True, slots=True)
class Sizes:
    """What one worker can do, as last known: that is asked for while there is none, too."""

    tokens_per_s: float = 0.0
    places: float = 0.0
    pages: float = 0.0

    def take(self, workers: Collection[WorkerFigures]) -> None:
        """Means over workers of each role; of a role without any what was known of it, or the other's."""
        prefill = [one for one in workers if one.serves == "prefill"]
        decode = [one for one in workers if one.serves == "decode"]
        self.tokens_per_s = _mean(one.tokens_per_s for one in prefill) or self.tokens_per_s
        self.tokens_per_s = self.tokens_per_s or _mean(one.tokens_per_s for one in decode)
        self.places = _mean(one.places for one in decode) or self.places or _mean(one.places for one in prefill)
        self.pages = _mean(one.pages for one in decode) or self.pages or _mean(one.pages for one in prefill)


def load_of(
    *,
    at: float,
    age_s: float,
    workers: Iterable[WorkerFigures],
    gateways: Sequence[GatewayFigures],
    rates: Rates,
    sizes: Sizes,
) -> Load:
    """`age_s`: of the oldest of these figures."""
    busy = [*workers] if any(one.answering + one.waiting for one in gateways) else []
    prefill = [one for one in busy if one.serves == "prefill"]
    decode = [one for one in busy if one.serves == "decode"]
    held_back = max((one.oldest_wait_s for one in gateways), default=0.0)
    return Load(
        at=at,
        age_s=age_s,
        prefill=PrefillLoad(
            queued_tokens=sum(one.waiting_tokens for one in prefill)
            + sum(one.waiting_tokens for one in gateways) * rates.uncached_share,
            oldest_wait_s=max([held_back, *(one.oldest_wait_s for one in prefill)]),
            arrived_tokens_per_s=rates.tokens_per_s,
            worker_tokens_per_s=sizes.tokens_per_s,
        ),
        decode=DecodeLoad(
            running=sum(one.running + one.transferring for one in decode) + sum(one.leaving for one in prefill),
            waiting=sum(one.waiting for one in decode) + sum(one.waiting for one in gateways),
            oldest_wait_s=max([held_back, *(one.oldest_wait_s for one in decode)]),
            arrived_per_s=rates.choices_per_s,
            seconds_each=rates.seconds_each,
            worker_places=sizes.places,
            used_pages=sum(one.used_pages for one in decode),
            worker_pages=sizes.pages,
        ),
        held=sum(one.held for one in gateways),
    )


def _mean(values: Iterable[float]) -> float:
    """Of those that are known; 0 when none is."""
    known = [value for value in values if value > 0]
    return sum(known) / len(known) if known else 0.0
