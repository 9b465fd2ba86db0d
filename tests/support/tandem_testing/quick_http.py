"""HTTP in the process of a test: servers end soon, and certificates are read once.

uvicorn looks every tenth of a second whether it is to end, and gives its connections another. Each client of httpx
reads all certificates of certifi, which takes longer than most tests. There are thousands of both.
"""

import asyncio
import functools
from typing import Any

import httpx
import pytest
import uvicorn.server
from httpx._transports import default as transports

LOOK_S = 0.005


class OftenLooking:
    """`asyncio` as uvicorn's server uses it, but for how long it sleeps."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    @staticmethod
    async def sleep(delay: float) -> None:
        await asyncio.sleep(min(delay, LOOK_S))


def make_http_quick() -> None:
    """From now on, for every server and client of this process."""
    patch = pytest.MonkeyPatch()
    patch.setattr(uvicorn.server, "asyncio", OftenLooking())
    patch.setattr(transports, "create_ssl_context", functools.cache(httpx.create_ssl_context))
