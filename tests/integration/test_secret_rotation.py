"""Secrets that change while a worker serves [secrets-reread]: it reads them again, without a restart.

API keys of gateways: tests/unit/services/gateway/access/test_key_watch.py. Both processes reach Redis alike.
"""

import pytest

from tandem_services.common.redis_client import RedisAddress, RedisClient, RedisUnavailableError
from tandem_services.common.sockets import free_port
from tandem_services.router.keys import Keys
from tandem_services.router.redis_functions import FunctionLibrary
from tandem_services.router.registry import FleetChanges, Registry
from tandem_testing.certificates import certify, tls_flags
from tandem_testing.redis_server import REDIS_SERVER, RedisServer
from tandem_testing.waiting import until

pytestmark = pytest.mark.skipif(REDIS_SERVER is None, reason="redis-server is not installed")

PATIENCE_S = 60.0


@pytest.fixture
def start():
    """Redis with these options; ended by its pid."""
    started = []

    def begin(*options: str) -> RedisServer:
        started.append(RedisServer.start(*options))
        return started[-1]

    yield begin
    for server in started:
        server.stop()


class Heart:
    """What of a worker or a gateway talks to Redis: its client, used once a second for as long as it lives."""

    def __init__(self, address: RedisAddress) -> None:
        self.client = RedisClient(address, timeout_s=PATIENCE_S)
        self.registry = Registry(library=FunctionLibrary(self.client), keys=Keys("default"))

    async def beats(self) -> bool:
        try:
            return isinstance(await self.registry.changes(0), FleetChanges)
        except RedisUnavailableError:
            return False


async def test_password_of_redis(start, tmp_path):
    server, path = start(), tmp_path / "password"
    grant = ("~*", "&*", "+@all")
    server.command("ACL", "SETUSER", "tandem", "on", ">first", *grant)
    path.write_text("first")
    heart = Heart(RedisAddress(url=server.url.replace("//", "//tandem@"), password_file=path))
    await until(heart.beats, PATIENCE_S, "with the first password")
    server.command("ACL", "SETUSER", "tandem", "resetpass", ">second")
    assert await heart.beats(), "a connection that is open stays"
    server.command("CLIENT", "KILL", "USER", "tandem")
    assert not await heart.beats()
    path.write_text("second")
    await until(heart.beats, PATIENCE_S, "with the second password")
    await heart.client.close()


async def test_certificate_of_redis_and_its_authority(start, tmp_path):
    certify(tmp_path)
    port = free_port()
    server = start("--tls-port", str(port), *tls_flags(tmp_path))
    trusted = tmp_path / "ca.crt"
    trusted.write_bytes((tmp_path / "tls.crt").read_bytes())
    heart = Heart(RedisAddress(url=f"rediss://localhost:{port}/0?ssl_ca_certs={trusted}"))
    await until(heart.beats, PATIENCE_S, "with the first certificate")
    certify(tmp_path)
    changed = [word.removeprefix("--") for word in tls_flags(tmp_path)[:4]]
    assert server.command("CONFIG", "SET", *changed).startswith("+OK")
    server.command("CLIENT", "KILL", "TYPE", "NORMAL", "SKIPME", "yes")
    assert not await heart.beats(), "nobody knows this certificate"
    trusted.write_bytes((tmp_path / "tls.crt").read_bytes())
    await until(heart.beats, PATIENCE_S, "with the second certificate")
    await heart.client.close()
