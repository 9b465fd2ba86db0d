"""Workers that change their role without a restart: who has, who should, and the order to do so.

An order is safe to repeat: a worker that serves in that role already goes on. What a worker serves as is in its own
metrics, so nothing is remembered here: a worker that restarts comes back in the role of its Deployment, and the next
look shows it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import httpx

from tandem_operator.api.roles import RoleName
from tandem_operator.telemetry.fetching import HEALTH_PORT
from tandem_operator.telemetry.looks import Seen
from tandem_operator.telemetry.orders import post_order
from tandem_operator.telemetry.pods import PodSeen

ORDER_S = 35.0
"""The worker gives its engine 30 s: a step that is being computed has to end first."""


@dataclass(frozen=True, slots=True)
class Flip:
    """A live worker is to serve in another role."""

    pod: PodSeen
    role: RoleName


def flips_of(workers: Iterable[PodSeen], seen: Seen) -> dict[RoleName, int]:
    """Pods that serve in each role and belong to the other's pool."""
    lent: dict[RoleName, int] = {"prefill": 0, "decode": 0}
    for pod in workers:
        serves = seen.serves(pod)
        if serves is not None and serves != pod.worker_role:
            lent[serves] += 1
    return lent


def candidates(count: int, workers: Iterable[PodSeen], seen: Seen) -> tuple[Flip, ...]:
    """Who flips: `count` from decode to prefill, negative the other way; fewer where fewer can.

    Those that come home go first, then the emptiest. A worker that says nothing, or drains, is left alone.
    """
    giver: RoleName = "decode" if count > 0 else "prefill"
    taker: RoleName = "prefill" if count > 0 else "decode"
    able = [
        pod
        for pod in workers
        if pod.ready
        and pod.name in seen.workers
        and not seen.workers[pod.name].draining
        and seen.workers[pod.name].serves == giver
    ]
    # The last worker of a role stays: without it nothing is served, whatever figures said.
    able = sorted(able, key=lambda pod: _price(pod, taker, seen))[: max(0, len(able) - 1)]
    return tuple(Flip(pod, taker) for pod in able[: abs(count)])


def _price(pod: PodSeen, taker: RoleName, seen: Seen) -> tuple[bool, float, str]:
    return (pod.worker_role != taker, seen.workers[pod.name].outstanding, pod.name)


async def order_flip(client: httpx.AsyncClient, flip: Flip, token: str) -> None:
    """Have it done. Raises `OrderFailedError` with what the worker, or the network, said."""
    await post_order(client, flip.pod, HEALTH_PORT, "/role", {"role": flip.role}, token=token, within_s=ORDER_S)
