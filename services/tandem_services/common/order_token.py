"""The token that orders to a part of a deployment bring, from whichever machine they come.

With a key file the token is derived from the key that all sockets of the deployment share, so there is no second secret
to hand out and to rotate. The operator derives the same one (`tandem_operator.telemetry.orders.order_token`). Without
keys, which is on loopback alone, each process draws its own.

Either is in a file that only its user can read, for `tandem ctl` on the same machine (`TokenFile`):

    $TMPDIR/tandem-UID/orders/NAMESPACE-PLACE-PORT      PLACE is `local`, or the address that the port is bound to

NAMESPACE is the number of the network namespace: in another one the same port is another process.
"""

import contextlib
import logging
import os
import secrets
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from secrets import compare_digest

from starlette.requests import HTTPConnection

from tandem_engine.addresses import Address, is_loopback, is_wildcard
from tandem_engine.ipc.keys import KeyPair
from tandem_services.common.private_folder import private_folder

logger = logging.getLogger(__name__)

NETWORK_NAMESPACE = Path("/proc/self/ns/net")
LOCAL = "local"
MAX_TOKEN_BYTES = 256


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
        """Where no folder can be written, `tandem ctl` needs --curve-keys: a warning says so."""
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
            return file.read(MAX_TOKEN_BYTES) or None
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
