"""Who may give orders to a part of a deployment: whoever has the deployment's key file, or is on the same machine.

The token is derived from the key that all sockets of the deployment share, so there is no second secret to hand out
and to rotate. The operator derives the same one (`tandem_operator.telemetry.orders.order_token`).
"""

from hashlib import blake2b
from secrets import compare_digest

from starlette.requests import HTTPConnection

from tandem_engine.addresses import is_loopback
from tandem_engine.ipc.keys import KeyPair


def order_token(keys: KeyPair) -> str:
    """What `Authorization: Bearer` has to bring; printable ASCII."""
    return blake2b(b"operator orders", key=keys.secret, digest_size=32).hexdigest()


def may_order(connection: HTTPConnection, token: str | None) -> bool:
    """Whether it is from loopback, by its address and no header, or brings `token`; None: there is none."""
    if connection.client is not None and is_loopback(connection.client.host):
        return True
    given = connection.headers.getlist("authorization")
    return token is not None and len(given) == 1 and compare_digest(given[0].encode(), f"Bearer {token}".encode())
