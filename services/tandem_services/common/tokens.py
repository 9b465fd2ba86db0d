"""Tokens for ports that services use among themselves, and the checks of commands over HTTP.

`BearerToken` is one token in a file. The file is read again when it changes, so that a rotated Secret needs no restart.
While it is missing, unreadable or empty, every request is rejected.

The order token authorizes commands to the workers and gateways of a deployment, from any machine. With a key file it is
derived from the key that all sockets of the deployment share, so there is no second secret to distribute; the operator
derives the same one (`tandem_operator.telemetry.worker_control.order_token`). Without a key file, on loopback only,
each process draws its own. `TokenFile` stores it for `tandem ctl` on the same machine, readable for its user only:

    $TMPDIR/tandem-UID/orders/NAMESPACE-PLACE-PORT      PLACE is `local`, or the address that the port is bound to

NAMESPACE is the number of the network namespace: the same port in another namespace is another process.

`OrderAccess` checks a command. Only the operator of a process may send one, no page in a browser. In this order:

    a Host that the port accepts (`allowed_hosts`), and no foreign Origin                    else 403
    of a POST: Content-Type application/json, which a page cannot send without a preflight   else 415
    the token, also from the same machine (`order_token`)                                    else 401
"""

import contextlib
import logging
import os
import re
import secrets
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from secrets import compare_digest
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection

from tandem_engine.base.addresses import Address, is_loopback, is_wildcard
from tandem_engine.base.errors import ConfigError
from tandem_engine.ipc.keys import KeyPair
from tandem_services.common.allowed_hosts import AllowedHosts
from tandem_services.common.private_folder import private_folder

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


NETWORK_NAMESPACE = Path("/proc/self/ns/net")
LOCAL = "local"
MAX_ORDER_TOKEN_BYTES = 256


def order_token(keys: KeyPair) -> str:
    """What `Authorization: Bearer` has to bring; printable ASCII."""
    return blake2b(b"operator orders", key=keys.secret, digest_size=32).hexdigest()


def token_for(keys: KeyPair | None) -> str:
    """That of the deployment, or a new one for a process without keys."""
    return secrets.token_hex(32) if keys is None else order_token(keys)


def brings_token(connection: HTTPConnection, token: str) -> bool:
    """Whether it has one Authorization header, with `token`."""
    given = connection.headers.getlist("authorization")
    return len(given) == 1 and compare_digest(given[0].encode(), f"Bearer {token}".encode())


@dataclass(kw_only=True, slots=True)
class TokenFile:
    """The token of one port, for `tandem ctl` of the same user and machine. `write`, and `remove` at the end."""

    token: str = field(repr=False)
    address: Address
    """That the port is bound to."""
    also: str = ""
    """Another host by which it is reached, such as --host of a port that is bound to all addresses."""

    def write(self) -> None:
        """Without a writable directory `tandem ctl` needs --curve-keys: a warning is logged."""
        try:
            for path in self._paths():
                path.unlink(missing_ok=True)
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
                with os.fdopen(descriptor, "w", encoding="ascii") as file:
                    file.write(self.token)
        except OSError as error:
            logger.warning(
                "cannot write the token for commands to a file, tandem ctl requires --curve-keys for this process: %s",
                error,
            )

    def remove(self) -> None:
        """Idempotent. A file that a newer process has written stays."""
        with contextlib.suppress(OSError):
            for path in self._paths():
                if path.read_text("ascii") == self.token:
                    path.unlink()

    def _paths(self) -> list[Path]:
        folder = orders_folder()
        hosts = dict.fromkeys(host for host in (self.address.host, self.also) if host)
        return [folder / _name(Address(host, self.address.port)) for host in hosts]


def token_of(address: Address) -> str | None:
    """The order token of the process of this user that listens at `address` of this machine, if it is known."""
    try:
        with (orders_folder() / _name(address)).open("r", encoding="ascii") as file:
            return file.read(MAX_ORDER_TOKEN_BYTES) or None
    except (OSError, ValueError):
        return None


def orders_folder() -> Path:
    """Of this user alone; made when it is not there. Raises `OSError`."""
    return private_folder("orders")


def _name(address: Address) -> str:
    here = is_loopback(address.host) or is_wildcard(address.host)
    place = LOCAL if here else address.host.replace(":", "_").replace("%", "_")
    try:
        namespace = NETWORK_NAMESPACE.stat().st_ino
    except OSError:
        namespace = 0
    return f"{namespace}-{place}-{address.port}"


JSON = "application/json"


@dataclass(frozen=True, slots=True)
class OrderRefusal:
    """Why an order is not taken."""

    status: int
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderAccess:
    """Of one port."""

    token: str
    hosts: AllowedHosts
    needs_token: bool = True
    """False where --allow-remote-orders leaves it to the network."""

    def refusal(self, request: HTTPConnection) -> OrderRefusal | None:
        """None where the order may be carried out."""
        foreign = foreign_origin(request, self.hosts)
        if foreign is not None:
            return OrderRefusal(403, foreign)
        if request.scope["method"] == "POST" and not is_json(request.headers.get("content-type")):
            return OrderRefusal(415, f"Content-Type must be {JSON}")
        if self.needs_token and not brings_token(request, self.token):
            return OrderRefusal(
                401,
                "orders need the token of this process: `tandem ctl` on this machine reads it, `tandem ctl "
                "--curve-keys FILE` derives it from the key file, other clients send Authorization: Bearer TOKEN "
                "(docs/worker-commands.md)",
            )
        return None


def foreign_origin(request: HTTPConnection, hosts: AllowedHosts) -> str | None:
    """Why a request may come from a page of another origin; None when it does not."""
    host = request.headers.get("host")
    if host is not None and not hosts.allow(host):
        return "this Host is not answered here: name it with --allowed-hosts, or use the address"
    origins = request.headers.getlist("origin")
    if any(urlsplit(origin).netloc.lower() != (host or "").lower() for origin in origins):
        return "requests of pages of another origin are not taken here"
    if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return "requests of pages of another site are not taken here"
    return None


def is_json(content_type: str | None) -> bool:
    """Whether a Content-Type header is JSON; None: there is none."""
    return content_type is not None and content_type.partition(";")[0].strip().lower() == JSON
