"""What one process of a gateway asks the others."""

import asyncio
from pathlib import Path
from urllib.parse import urlencode

import msgspec

from tandem_services.gateway.observe.explain import RequestRecord
from tandem_services.gateway.process_place import ProcessPlace, socket_of
from tandem_services.gateway.processes.unix_http import ask

EXPLAIN_PATH = "/internal/explain"

ASK_S = 2.0
"""For what another process knows of a request."""


async def explained_elsewhere(place: ProcessPlace, request_id: str, *, tenant: str) -> RequestRecord | None:
    """What another process knows of a request of `tenant`. Those that do not answer in time know nothing."""
    target = f"{EXPLAIN_PATH}?{urlencode({'request_id': request_id, 'tenant': tenant})}"
    others = [number for number in range(place.count) if number != place.number]
    found = await asyncio.gather(*(_asked(socket_of(place.folder, number), target) for number in others))
    return next((record for record in found if record is not None), None)


async def _asked(socket: Path, target: str) -> RequestRecord | None:
    try:
        async with asyncio.timeout(ASK_S), ask(socket, "GET", target) as answer:
            if answer.status != 200:
                return None
            return msgspec.json.decode(await answer.read(), type=RequestRecord)
    except (OSError, TimeoutError, msgspec.DecodeError):
        return None
