"""The place of one process among several that are one gateway (`--processes`), and how it reaches the others.

The supervisor writes the place of each into a folder that only this user can open. The sockets of their administrators'
routes are there as well, which require the same keys as an administrators' port.
"""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlencode

import msgspec

from tandem_engine.base.errors import ConfigError
from tandem_services.gateway.observe.explain import RequestRecord
from tandem_services.gateway.processes.unix_http import ask

MOST_PROCESSES = 8
"""Workers send each of them a message per step."""

EXPLAIN_PATH = "/internal/explain"
ASK_S = 2.0
"""For what another process knows of a request."""


class Place(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """As it is in the file."""

    number: int
    count: int
    listener: int
    """Descriptor of its listening socket."""
    token: str
    """For commands, where there is no key file: the same in all processes."""


@dataclass(frozen=True, slots=True)
class ProcessPlace:
    """One of `count` processes, from 0."""

    folder: Path
    number: int
    count: int
    listener: int
    token: str = field(repr=False)

    @property
    def socket(self) -> Path:
        return socket_of(self.folder, self.number)

    def share_of(self, total: int) -> int:
        """Of a limit that none may exceed together and each must keep alone: the shares of all add up to `total`."""
        return total // self.count + (self.number < total % self.count)

    async def ask_others(self, request_id: str, *, tenant: str) -> RequestRecord | None:
        """What another process knows of a request of `tenant`. Those that do not answer in time know nothing."""
        target = f"{EXPLAIN_PATH}?{urlencode({'request_id': request_id, 'tenant': tenant})}"
        others = [number for number in range(self.count) if number != self.number]
        found = await asyncio.gather(*(_asked(socket_of(self.folder, number), target) for number in others))
        return next((record for record in found if record is not None), None)


async def _asked(socket: Path, target: str) -> RequestRecord | None:
    try:
        async with asyncio.timeout(ASK_S), ask(socket, "GET", target) as answer:
            if answer.status != 200:
                return None
            return msgspec.json.decode(await answer.read(), type=RequestRecord)
    except (OSError, TimeoutError, msgspec.DecodeError):
        return None


def socket_of(folder: Path, number: int) -> Path:
    """Of the administrators' routes of one process."""
    return folder / f"{number}.sock"


def write_place(folder: Path, place: Place) -> Path:
    path = folder / f"{place.number}.json"
    path.write_bytes(msgspec.json.encode(place))
    return path


def read_place(path: Path) -> ProcessPlace:
    """Raises `ConfigError`."""
    try:
        place = msgspec.json.decode(path.read_bytes(), type=Place)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"--process-place {path}: {error}") from error
    return ProcessPlace(path.parent, place.number, place.count, place.listener, place.token)
