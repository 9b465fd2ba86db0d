"""One token that opens a port: what services among themselves use, as opposed to the API keys of users.

The file is read again whenever it changes, so that a rotated Secret needs no restart. While it cannot be read, or holds
nothing, nobody is let in.
"""

import logging
import re
from dataclasses import dataclass, field
from pathlib import Path
from secrets import compare_digest

from tandem_engine.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_TOKEN_BYTES = 4096
_BEARER = re.compile(rf"[Bb]earer +([\x21-\x7e]{{1,{MAX_TOKEN_BYTES}}}) *")


@dataclass(kw_only=True, slots=True)
class BearerToken:
    """The token in `path`. Raises `ConfigError` when there is none at the start."""

    path: Path
    _token: bytes | None = field(default=None, init=False)
    _seen: tuple[int, int, int] = field(default=(0, 0, 0), init=False)

    def __post_init__(self) -> None:
        self._follow()
        if self._token is None:
            raise ConfigError(f"--token-file {self.path}: must be a file with a token of printable ASCII in it")

    def admits(self, authorization: str | None) -> bool:
        """Whether a header `Authorization: Bearer TOKEN` has the token of now."""
        self._follow()
        given = _BEARER.fullmatch(authorization or "")
        return given is not None and self._token is not None and compare_digest(given[1].encode("ascii"), self._token)

    def _follow(self) -> None:
        try:
            stat = self.path.stat()
            signature = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
            if signature != self._seen:
                self._token, self._seen = _read(self.path), signature
        except OSError as error:
            if self._token is not None:
                logger.error("cannot read --token-file %s, rejecting all requests: %s", self.path, error.strerror)
            self._token, self._seen = None, (0, 0, 0)


def _read(path: Path) -> bytes | None:
    """None for what cannot be sent in a header."""
    with path.open("rb") as file:
        token = file.read(MAX_TOKEN_BYTES + 1).strip()
    return token if re.fullmatch(rb"[\x21-\x7e]{1,%d}" % MAX_TOKEN_BYTES, token) else None
