"""Asking pods over HTTP: all at once, and bounded in time, in bytes and in number.

A pod is not trusted to answer, nor to end: what it says is cut off at `MAX_BYTES`, and redirects are not followed, so
that it cannot send the operator elsewhere.
"""

import asyncio
from collections.abc import Mapping, Sequence

import httpx

from tandem_operator.telemetry.exposition import Exposition, UnusableFiguresError
from tandem_operator.telemetry.figures import Figures, GatewayFigures, WorkerFigures
from tandem_operator.telemetry.pods import PodSeen

ANSWER_S = 3.0
"""Less than a period of the autoscaler, so that one pod that hangs does not delay a decision."""
MAX_BYTES = 4 << 20
AT_ONCE = 32

HEALTH_PORT = "health"
ADMIN_PORT = "admin"


def pod_client() -> httpx.AsyncClient:
    """For pods alone: no proxy of the environment, no redirects, no cookies to speak of."""
    limits = httpx.Limits(max_connections=AT_ONCE, max_keepalive_connections=AT_ONCE)
    return httpx.AsyncClient(trust_env=False, follow_redirects=False, timeout=ANSWER_S, limits=limits)


async def fetch_figures(client: httpx.AsyncClient, pods: Sequence[PodSeen]) -> dict[str, Figures | str]:
    """By uid: what each pod says, or in one sentence why it says nothing. Pods without an address are left out."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def ask(pod: PodSeen, url: str) -> Figures | str:
        async with slots:
            return await _figures(client, pod, url)

    asked = [(pod, url) for pod in pods if (url := metrics_url(pod)) is not None]
    answers = await asyncio.gather(*(ask(pod, url) for pod, url in asked))
    return {pod.uid: answer for (pod, _), answer in zip(asked, answers, strict=True)}


def metrics_url(pod: PodSeen) -> str | None:
    return pod.url(ADMIN_PORT if pod.role == "gateway" else HEALTH_PORT, "/metrics")


async def _figures(client: httpx.AsyncClient, pod: PodSeen, url: str) -> Figures | str:
    try:
        async with asyncio.timeout(ANSWER_S):
            text = await bounded_text(client, url, headers={})
        exposition = Exposition.parse(text)
        return GatewayFigures.of(exposition) if pod.role == "gateway" else WorkerFigures.of(exposition)
    except TimeoutError:
        return f"it does not answer within {ANSWER_S:.0f} s"
    except httpx.HTTPError as error:
        return f"it cannot be reached: {error!r}"
    except UnusableFiguresError as error:
        return str(error)


async def bounded_text(client: httpx.AsyncClient, url: str, *, headers: Mapping[str, str]) -> str:
    """Body of a 200. Raises `UnusableFiguresError` for everything else that comes, `httpx.HTTPError` when none does."""
    async with client.stream("GET", url, headers=headers) as response:
        if response.status_code != 200:
            raise UnusableFiguresError(f"it answers with status {response.status_code}")
        data = bytearray()
        async for chunk in response.aiter_bytes():
            data += chunk
            if len(data) > MAX_BYTES:
                raise UnusableFiguresError(f"its answer has more than {MAX_BYTES >> 20} MiB")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnusableFiguresError("its answer is not UTF-8") from error
