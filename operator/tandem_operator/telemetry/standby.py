"""Workers on standby: who they are, and the order that has them offered to the router.

A worker that the operator has made registers, warms its links and then stands by: it serves a request that names it,
and the router chooses it for none. Its `/ready` says so (503, status "standby"), so its pod is not Ready either. When
a canary has passed through a pair of its revision the order `POST /offer` ends that, for good.

Nothing of this is remembered here: who stands by says so himself, and what a canary says can be asked again, by any
operator. Where none comes, workers help themselves (`tandem_services.worker.standby`).
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import replace

import httpx
import msgspec

from tandem_operator.telemetry.fetching import ANSWER_S, AT_ONCE, HEALTH_PORT
from tandem_operator.telemetry.orders import post_order
from tandem_operator.telemetry.pods import PodSeen

STANDBY = "standby"
ORDER_S = 5.0
MAX_BYTES = 1 << 16
"""Of an answer of `/ready`."""


class _Readiness(msgspec.Struct):
    """What of `/ready` is of interest."""

    status: str = ""


def starting(pods: Iterable[PodSeen]) -> list[PodSeen]:
    """Workers that may stand by: they have an address and are not ready yet."""
    return [pod for pod in pods if pod.worker_role and not pod.ready and not pod.terminating and pod.ip]


async def with_standby(client: httpx.AsyncClient, pods: Sequence[PodSeen]) -> tuple[PodSeen, ...]:
    """`pods`, those marked that say that they stand by. Ends in time whatever they do; who is silent does not."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def ask(pod: PodSeen) -> str:
        async with slots:
            return pod.uid if await _stands_by(client, pod) else ""

    found = set(await asyncio.gather(*(ask(pod) for pod in starting(pods))))
    return tuple(replace(pod, standby=True) if pod.uid in found else pod for pod in pods)


async def order_offer(client: httpx.AsyncClient, pod: PodSeen, token: str) -> None:
    """Safe to repeat. Raises `OrderFailedError`."""
    await post_order(client, pod, HEALTH_PORT, "/offer", {}, token=token, within_s=ORDER_S)


async def _stands_by(client: httpx.AsyncClient, pod: PodSeen) -> bool:
    url = pod.url(HEALTH_PORT, "/ready")
    if url is None:
        return False
    data = bytearray()
    try:
        async with asyncio.timeout(ANSWER_S), client.stream("GET", url) as response:
            async for chunk in response.aiter_bytes():
                data += chunk
                if len(data) > MAX_BYTES:
                    return False
        return msgspec.json.decode(bytes(data), type=_Readiness).status == STANDBY
    except (TimeoutError, httpx.HTTPError, msgspec.DecodeError, UnicodeDecodeError):
        # It starts, or is no worker that can stand by.
        return False
