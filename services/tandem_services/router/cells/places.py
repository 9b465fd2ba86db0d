"""Where the other cells of a gateway are: their names and Redis servers.

A cell is a fleet of its own: workers, a Redis, and gateways that prefer it. Its name is the `--cluster` of its workers.
All cells of a gateway serve one model with one key file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tandem_engine.base.errors import ConfigError
from tandem_services.common.redis_client import RedisAddress
from tandem_services.common.redis_url import RedisUrl, mask_password
from tandem_services.router.keys import check_name

MAX_CELLS = 64
"""Other cells of a gateway, each of which it asks once a second how it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CellPlace:
    """Another cell."""

    name: str
    """The `--cluster` of its workers."""
    url: str = field(repr=False)
    password_file: Path | None = None

    def address(self) -> RedisAddress:
        """Raises `ConfigError` while a file is missing: another cell may come and go."""
        return RedisAddress(url=self.url, password_file=self.password_file)


def read_places(cells: Sequence[str], password_files: Sequence[str], *, own: str) -> tuple[CellPlace, ...]:
    """Of NAME=URL and NAME=FILE. `own`: name of the gateway's cell. Raises `ConfigError`."""
    urls = _pairs("--cells", "URL", cells)
    files = _pairs("--cell-password-files", "FILE", password_files)
    if len(urls) > MAX_CELLS:
        raise ConfigError(f"--cells: {len(urls)} cells; a gateway may have {MAX_CELLS} others")
    for name, url in urls.items():
        check_name("--cells: a name", name)
        if name == own:
            raise ConfigError(f"--cells: {name!r} is the gateway's own --cluster; name the other cells alone")
        _check_url(name, url)
    for name in files:
        if name not in urls:
            raise ConfigError(f"--cell-password-files: {name!r} is not in --cells; add {name}=URL there")
    return tuple(
        CellPlace(name=name, url=url, password_file=Path(files[name]).expanduser() if name in files else None)
        for name, url in urls.items()
    )


def _check_url(name: str, url: str) -> None:
    shown = mask_password(url)
    try:
        parsed = RedisUrl.parse(url)
    except ConfigError as error:
        reason = str(error).removeprefix(f"--redis-url {shown}: ")
        raise ConfigError(f"--cells {name}={shown}: {reason}") from error
    if parsed.password is not None:
        raise ConfigError(
            f"--cells {name}={shown}: all users of a machine can read arguments; put the password into a file and add "
            f"--cell-password-files {name}=FILE"
        )


def _pairs(flag: str, value: str, words: Sequence[str]) -> Mapping[str, str]:
    found: dict[str, str] = {}
    for word in words:
        name, separator, text = word.partition("=")
        if not (name and separator and text):
            raise ConfigError(f"{flag} is NAME={value}, where NAME is the --cluster of the cell, got {name[:100]!r}")
        if name in found:
            raise ConfigError(f"{flag}: {name!r} is given twice; each cell has a --cluster of its own")
        found[name] = text
    return found
