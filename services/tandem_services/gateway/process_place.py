"""The place of one process among several that are one gateway (`--processes`).

The supervisor writes the place of each into a folder that only this user can open. The sockets of their administrators'
routes are there as well, which require the same keys as an administrators' port.
"""

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tandem_engine.base.errors import ConfigError

MAX_PROCESSES = 8
"""Workers send each of them a message per step."""


class PlaceFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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
        """Is there once the process serves."""
        return socket_of(self.folder, self.number)

    @property
    def new_socket(self) -> Path:
        """The same before that."""
        return self.socket.with_suffix(".new")

    def share_of(self, total: int) -> int:
        """Of a limit that each must keep alone: the shares of all add up to `total`."""
        return total // self.count + (self.number < total % self.count)


def socket_of(folder: Path, number: int) -> Path:
    """Of the administrators' routes of one process."""
    return folder / f"{number}.sock"


def write_place(folder: Path, place: PlaceFile) -> Path:
    path = folder / f"{place.number}.json"
    path.write_bytes(msgspec.json.encode(place))
    return path


def read_place(path: Path) -> ProcessPlace:
    """Raises `ConfigError`."""
    try:
        place = msgspec.json.decode(path.read_bytes(), type=PlaceFile)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"--process-place {path}: {error}") from error
    return ProcessPlace(path.parent, place.number, place.count, place.listener, place.token)
