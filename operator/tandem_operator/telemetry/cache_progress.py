"""The progress of a pod that downloads for a ModelCache, over HTTP.

It is shown and decides nothing: which commit is whole, and why one is not, is in the pod's status.
"""

import asyncio

import httpx
import msgspec

from tandem_operator.planning.model_cache import ProgressReading
from tandem_operator.telemetry.exposition import UnusableFiguresError
from tandem_operator.telemetry.pods import ANSWER_S, bounded_text

PATH = "/progress"


async def fetch_progress(client: httpx.AsyncClient, url: str) -> ProgressReading | None:
    """None without an answer that can be used."""
    try:
        async with asyncio.timeout(ANSWER_S):
            text = await bounded_text(client, url, headers={})
        return msgspec.json.decode(text, type=ProgressReading)
    except (TimeoutError, httpx.HTTPError, UnusableFiguresError, msgspec.DecodeError, RecursionError):
        return None
