"""A primary that Sentinels name, over a plain connection and over TLS."""

import pytest

from tandem_services.common.redis_client import RedisAddress, RedisClient, RedisUnavailableError
from tandem_services.common.sockets import free_port
from tandem_testing.certificates import certify, tls_flags
from tandem_testing.redis_calls import every_call
from tandem_testing.redis_fleets import SERVICE, WatchedPair, redis_sentinels
from tandem_testing.redis_server import REDIS_SERVER, RedisServer
from tandem_testing.router_builders import PATIENT_S, Fleet
from tandem_testing.waiting import until


@pytest.fixture
async def watched(tmp_path):
    if REDIS_SERVER is None:
        pytest.skip("redis-server is not installed")
    async with redis_sentinels(tmp_path) as made:
        yield made


class Place:
    """What a fleet needs of a server: its URL."""

    def __init__(self, url: str) -> None:
        self.url = url


async def answers(client: RedisClient) -> bool:
    try:
        return await client.command("SET", "tandem:{default}:x", "y", "PX", 60_000) is not None
    except RedisUnavailableError:
        return False


def has_it(watched: WatchedPair) -> bool:
    return watched.primary.command("GET", "tandem:{default}:x").startswith("$1")


async def test_primary_that_sentinels_name_is_used_and_followed(watched):
    watched.sentinels[0].stop()  # the URL names it first
    del watched.sentinels[0]
    fleet = Fleet(Place(watched.url_of(database=0)))
    await every_call(fleet)
    await watched.in_step()
    await watched.fail_over()
    await until(lambda: answers(fleet.client), PATIENT_S, "the new primary answers")
    assert has_it(watched)
    await fleet.close()


async def test_another_database_of_a_sentinels_primary_is_used(watched):
    client = RedisClient(RedisAddress(url=watched.url_of(database=2)), timeout_s=PATIENT_S)
    assert await answers(client)
    assert not has_it(watched)
    assert "db2:keys=1" in watched.primary.command("INFO", "keyspace")
    await client.close()


async def test_service_that_sentinels_do_not_have_is_named(watched):
    url = watched.url.replace(f"/{SERVICE}/", "/absent/")
    client = RedisClient(RedisAddress(url=url), timeout_s=PATIENT_S)
    with pytest.raises(RedisUnavailableError, match="it has no service 'absent'"):
        await client.require(wait_s=0)
    await client.close()


async def test_sentinels_and_their_primary_have_separate_users(watched, tmp_path):
    secret = tmp_path / "sentinel"
    secret.write_text("watch\n")
    for sentinel in watched.sentinels:
        sentinel.command(
            "ACL", "SETUSER", "reader", "on", ">watch", "-@all", "+sentinel|get-master-addr-by-name", "+auth"
        )
        sentinel.command("ACL", "SETUSER", "default", "-sentinel|get-master-addr-by-name")
    watched.primary.command("ACL", "SETUSER", "tandem", "on", ">pass", "~*", "+@all")
    url = watched.url_of(user="tandem:pass@")
    client = RedisClient(RedisAddress(url=url), timeout_s=PATIENT_S)
    with pytest.raises(RedisUnavailableError, match="(?i)no permissions"):
        await client.command("PING")
    await client.close()
    options = f"?sentinel_username=reader&sentinel_password_file={secret}"
    client = RedisClient(RedisAddress(url=url + options), timeout_s=PATIENT_S)
    assert await answers(client)
    await client.close()


async def test_sentinels_and_primary_are_reached_over_tls(tmp_path):
    if REDIS_SERVER is None:
        pytest.skip("redis-server is not installed")
    certify(tmp_path)
    flags, ports = (*tls_flags(tmp_path), "--tls-replication", "yes"), (free_port(), free_port())
    primary = RedisServer.start("--tls-port", str(ports[0]), *flags)
    config = tmp_path / "sentinel.conf"
    config.write_text(f"sentinel monitor {SERVICE} 127.0.0.1 {ports[0]} 1\n")
    sentinel = RedisServer.start("--tls-port", str(ports[1]), *flags, sentinel=config)
    try:
        url = f"rediss+sentinel://localhost:{ports[1]}/{SERVICE}"
        trusting = RedisClient(RedisAddress(url=f"{url}?ssl_ca_certs={tmp_path / 'tls.crt'}"), timeout_s=PATIENT_S)
        assert await answers(trusting)
        await trusting.close()
        strange = RedisClient(RedisAddress(url=url), timeout_s=PATIENT_S)
        with pytest.raises(RedisUnavailableError, match="CERTIFICATE_VERIFY_FAILED"):
            await strange.require(wait_s=0)
        await strange.close()
    finally:
        primary.stop()
        sentinel.stop()
