"""Commands from the operator to its pods, authorized by the order token of the service's key file (`order_token`).

Canary requests prove that a prefill and a decode worker serve together, and that a gateway reaches them. A gateway runs
them on its administrators' port (`POST /canary`): greedy, a few tokens, bounded by a deadline, charged to no tenant. It
returns `passed` only when every token arrived and KV was transferred from prefill to decode. A revision's canary names
two of its pods; the service's canary uses the router's choice.

Standby: a worker created by the operator registers, tests its links and stays on standby. It serves requests that name
it, but the router selects it for none. Its `/ready` reports this (503, status "standby"), so its pod is not Ready
either. `POST /offer` ends the standby permanently after a canary has passed through the worker.

Nothing is stored here: workers report their standby, and any operator can repeat a canary. Without an operator, workers
offer themselves (`tandem_services.worker.standby`).
"""

import asyncio
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any, NamedTuple

import httpx
import msgspec

from tandem_operator.planning.observed import Canary
from tandem_operator.telemetry.pods import ADMIN_PORT, ANSWER_S, AT_ONCE, HEALTH_PORT, MAX_BYTES, PodSeen

CURVE_KEY_BYTES = 40
MAX_SHOWN = 512


class ModelAt(NamedTuple):
    """One of several models of a gateway."""

    name: str
    """There."""
    cluster: str
    """Its fleet: after a change of names a gateway may have another one under this name for a while."""

    @property
    def fields(self) -> dict[str, str]:
        """Of a command about it."""
        return {"model": self.name, "cluster": self.cluster}


class OrderFailedError(Exception):
    """A pod refused, or did not answer in time. The sentence is for people."""


def order_token(key_file: bytes) -> str:
    """The order token that workers and gateways derive, too, from key `keys.json` of the service's Secret.

    Raises `ValueError` when that is no key file.
    """
    try:
        secret = json.loads(key_file)["secret"].encode("ascii")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError("keys.json is not a key file: it has no field `secret` with a CURVE key") from error
    if len(secret) != CURVE_KEY_BYTES:
        raise ValueError(f"keys.json: `secret` must be {CURVE_KEY_BYTES} Z85 characters, it has {len(secret)}")
    return blake2b(b"operator orders", key=secret, digest_size=32).hexdigest()


async def post_order(
    client: httpx.AsyncClient,
    pod: PodSeen,
    port: str,
    path: str,
    body: Mapping[str, Any],
    *,
    token: str,
    within_s: float,
) -> dict[str, Any]:
    """The pod's answer to `body`. Raises `OrderFailedError`."""
    return await _answer(client, "POST", pod, port, path, body, token=token, within_s=within_s)


async def get_with_token(
    client: httpx.AsyncClient, pod: PodSeen, port: str, path: str, *, token: str, within_s: float
) -> dict[str, Any]:
    """What the pod has at `path`, for those with the token. Raises `OrderFailedError`."""
    return await _answer(client, "GET", pod, port, path, None, token=token, within_s=within_s)


async def _answer(
    client: httpx.AsyncClient,
    method: str,
    pod: PodSeen,
    port: str,
    path: str,
    body: Mapping[str, Any] | None,
    *,
    token: str,
    within_s: float,
) -> dict[str, Any]:
    url = pod.url(port, path)
    if url is None:
        raise OrderFailedError(f"pod {pod.name} has no address yet")
    headers = {"Authorization": f"Bearer {token}"}
    try:
        async with (
            asyncio.timeout(within_s),
            client.stream(method, url, json=body, headers=headers, timeout=within_s) as response,
        ):
            data = bytearray()
            async for chunk in response.aiter_bytes():
                data += chunk
                if len(data) > MAX_BYTES:
                    raise OrderFailedError(f"pod {pod.name} answers {path} with more than {MAX_BYTES >> 20} MiB")
    except TimeoutError as error:
        raise OrderFailedError(f"pod {pod.name} did not answer {path} within {within_s:.0f} s") from error
    except httpx.HTTPError as error:
        raise OrderFailedError(f"pod {pod.name} cannot be reached: {error!r}") from error
    answer = _decoded(bytes(data))
    if response.status_code // 100 != 2 or answer is None:
        text = bytes(data[:MAX_SHOWN]).decode("utf-8", "replace")
        raise OrderFailedError(f"pod {pod.name} answered {path} with {response.status_code}: {text}")
    return answer


def _decoded(data: bytes) -> dict[str, Any] | None:
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) else None


WITHIN_S = 20.0
"""A pair that has just started may compile a kernel first."""

CANARY_ANSWER_S = 5.0
"""For the gateway to say so, after the deadline of the request itself."""

MAX_MESSAGE = 512


def pair_of(revision: str, pods: Iterable[PodSeen]) -> tuple[PodSeen, PodSeen] | None:
    """A prefill and a decode pod of one revision, ready or on standby; None while there are none.

    Always the same ones, and ready ones first: what they say of a revision counts for those on standby.
    """
    usable = sorted(
        (pod for pod in pods if pod.usable and pod.revision == revision), key=lambda pod: (pod.standby, pod.name)
    )
    prefill = next((pod for pod in usable if pod.role == "prefill"), None)
    decode = next((pod for pod in usable if pod.role == "decode"), None)
    return None if prefill is None or decode is None else (prefill, decode)


async def run_canary(
    client: httpx.AsyncClient,
    gateway: PodSeen,
    token: str,
    *,
    pair: tuple[PodSeen, PodSeen] | None = None,
    model: ModelAt | None = None,
    within_s: float = WITHIN_S,
) -> Canary:
    """One canary through `gateway`: through this prefill and decode pod, or through the router's choice. `model`: for a
    gateway that has several.

    What goes wrong, the gateway's own silence included, is a canary that has not passed, with the reason. `token` is
    that of `orders.order_token`.
    """
    body: dict[str, str | float] = {"within_s": within_s}
    if pair is not None:
        body |= {"prefill": pair[0].name, "decode": pair[1].name}
    body |= {} if model is None else model.fields
    try:
        answer = await post_order(
            client, gateway, ADMIN_PORT, "/canary", body, token=token, within_s=within_s + CANARY_ANSWER_S
        )
    except OrderFailedError as error:
        return Canary(passed=False, message=str(error)[:MAX_MESSAGE])
    return Canary(
        passed=answer.get("passed") is True,
        message=str(answer.get("message", ""))[:MAX_MESSAGE],
        unserved=answer.get("unserved") is True,
    )


logger = logging.getLogger(__name__)
STANDBY = "standby"
READY = "ok"
ORDER_S = 5.0

STANDBY_MAX_BYTES = 1 << 16
"""Of an answer of `/ready`."""


class _Readiness(msgspec.Struct):
    """What of `/ready` is of interest."""

    status: str = ""


def starting(pods: Iterable[PodSeen]) -> list[PodSeen]:
    """Workers that may stand by: they have an address and are not ready yet."""
    return [pod for pod in pods if pod.worker_role and not pod.ready and not pod.terminating and pod.ip]


async def with_standby(client: httpx.AsyncClient, pods: Sequence[PodSeen]) -> tuple[PodSeen, ...]:
    """`pods`, those marked that say that they stand by, and as ready those that say so before the kubelet does. Ends in
    time whatever they do; a silent one stays as it was.
    """
    slots = asyncio.Semaphore(AT_ONCE)

    async def ask(pod: PodSeen) -> str:
        async with slots:
            return await _readiness(client, pod)

    asked = starting(pods)
    statuses = dict(zip((pod.uid for pod in asked), await asyncio.gather(*map(ask, asked)), strict=True))
    return tuple(_with_status(pod, statuses.get(pod.uid, "")) for pod in pods)


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


def _with_status(pod: PodSeen, status: str) -> PodSeen:
    return replace(pod, standby=status == STANDBY, ready=pod.ready or status == READY)


async def _readiness(client: httpx.AsyncClient, pod: PodSeen) -> str:
    """The status in its `/ready`; "" when that cannot be read."""
    url = pod.url(HEALTH_PORT, "/ready")
    if url is None:
        return ""
    data = bytearray()
    try:
        async with asyncio.timeout(ANSWER_S), client.stream("GET", url) as response:
            async for chunk in response.aiter_bytes():
                data += chunk
                if len(data) > STANDBY_MAX_BYTES:
                    return ""
        return msgspec.json.decode(bytes(data), type=_Readiness).status
    except (TimeoutError, httpx.HTTPError, msgspec.DecodeError, UnicodeDecodeError):
        # It starts, or is no worker that can stand by.
        return ""
