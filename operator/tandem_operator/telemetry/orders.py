"""Orders to Tandem's own pods: HTTP with the token that only the service's key file gives (`order_token`)."""

import asyncio
import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import httpx

from tandem_operator.telemetry.fetching import MAX_BYTES
from tandem_operator.telemetry.pods import PodSeen

CURVE_KEY_BYTES = 40
MOST_SHOWN = 512


class OrderFailedError(Exception):
    """A pod refused, or did not answer in time. The sentence is for people."""


def order_token(key_file: bytes) -> str:
    """What workers and gateways derive alike from key `keys.json` of the service's Secret.

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
    url = pod.url(port, path)
    if url is None:
        raise OrderFailedError(f"pod {pod.name} has no address yet")
    headers = {"Authorization": f"Bearer {token}"}
    try:
        async with (
            asyncio.timeout(within_s),
            client.stream("POST", url, json=body, headers=headers, timeout=within_s) as response,
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
        said = bytes(data[:MOST_SHOWN]).decode("utf-8", "replace")
        raise OrderFailedError(f"pod {pod.name} answered {path} with {response.status_code}: {said}")
    return answer


def _decoded(data: bytes) -> dict[str, Any] | None:
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) else None
