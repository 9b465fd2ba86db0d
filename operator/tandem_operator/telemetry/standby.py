"""Workers on standby: who they are, and the order that has them offered to the router.

A worker that the operator has made registers, warms its links and then stands by: it serves a request that names it,
and the router chooses it for none. Its `/ready` says so (503, status "standby"), so its pod is not Ready either. When
a canary has passed through it the order `POST /offer` ends that, for good.

Nothing of this is remembered here: who stands by says so himself, and what a canary says can be asked again, by any
operator. Where none comes, workers help themselves (`tandem_services.worker.standby`).
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace

import httpx
import msgspec

from tandem_operator.telemetry.fetching import ANSWER_S, AT_ONCE, HEALTH_PORT
from tandem_operator.telemetry.orders import OrderFailedError, post_order
from tandem_operator.telemetry.pods import PodSeen

logger = logging.getLogger(__name__)

STANDBY = "standby"
READY = "ok"
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
    """`pods`, those marked that say that they stand by, and as ready those that say so before the kubelet does. Ends in
    time whatever they do; who is silent stays as it was.
    """
    slots = asyncio.Semaphore(AT_ONCE)

    async def ask(pod: PodSeen) -> str:
        async with slots:
            return await _readiness(client, pod)

    asked = starting(pods)
    said = dict(zip((pod.uid for pod in asked), await asyncio.gather(*map(ask, asked)), strict=True))
    return tuple(_as_it_says(pod, said.get(pod.uid, "")) for pod in pods)


async def order_offer(client: httpx.AsyncClient, pod: PodSeen, token: str) -> None:
    """Safe to repeat. Raises `OrderFailedError`."""
    await post_order(client, pod, HEALTH_PORT, "/offer", {}, token=token, within_s=ORDER_S)


async def order_hold(client: httpx.AsyncClient, pod: PodSeen, token: str) -> None:
    """Keep it from helping itself while it is tried. One that refuses is of an older release and helps itself at once;
    whether it is offered then is seen at the next look.
    """
    try:
        await post_order(client, pod, HEALTH_PORT, "/hold", {}, token=token, within_s=ORDER_S)
    except OrderFailedError as error:
        logger.debug("cannot hold the standby of %s: %s", pod.name, error)


def _as_it_says(pod: PodSeen, status: str) -> PodSeen:
    return replace(pod, standby=status == STANDBY, ready=pod.ready or status == READY)


async def _readiness(client: httpx.AsyncClient, pod: PodSeen) -> str:
    """What its `/ready` says; "" when that is nothing one can read."""
    url = pod.url(HEALTH_PORT, "/ready")
    if url is None:
        return ""
    data = bytearray()
    try:
        async with asyncio.timeout(ANSWER_S), client.stream("GET", url) as response:
            async for chunk in response.aiter_bytes():
                data += chunk
                if len(data) > MAX_BYTES:
                    return ""
        return msgspec.json.decode(bytes(data), type=_Readiness).status
    except (TimeoutError, httpx.HTTPError, msgspec.DecodeError, UnicodeDecodeError):
        # It starts, or is no worker that can stand by.
        return ""
