"""The redis-server of `tandem up` and `tandem simulate`: a socket that only its user can open."""

import asyncio
import stat
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tandem_services.cli.processes import Supervisor, start_redis
from tandem_services.common.redis_client import RedisAddress, RedisClient
from tandem_testing.redis_server import REDIS_SERVER

pytestmark = pytest.mark.skipif(REDIS_SERVER is None, reason="redis-server is not installed")


@pytest.fixture
def supervisor():
    made = Supervisor()
    yield made
    made.stop(5.0)


async def ask(url: str, *command: str) -> object:
    client = RedisClient(RedisAddress(url=url), timeout_s=30.0)
    try:
        return await client.command(*command)
    finally:
        await client.close()


@pytest.mark.parametrize("folder", ["run", 'with space and "quote"', "long" * 40])
def test_bundled_redis_listens_on_a_private_socket_alone(supervisor, tmp_path, folder) -> None:
    run_dir = tmp_path / folder
    run_dir.mkdir(mode=0o700)
    url = start_redis(supervisor, run_dir)
    door = Path(unquote(urlsplit(url).path))
    status = door.lstat()
    assert stat.S_ISSOCK(status.st_mode)
    assert not status.st_mode & 0o077
    assert not door.parent.stat().st_mode & 0o077
    assert stat.S_IMODE((run_dir / "redis.conf").stat().st_mode) == 0o600
    assert asyncio.run(ask(url, "PING")) in (b"PONG", True)
    port = asyncio.run(ask(url, "CONFIG", "GET", "port"))
    assert "0" in str(port)
    assert "6379" not in str(port)


def test_file_of_the_user_with_the_name_of_the_socket_stays(supervisor, tmp_path) -> None:
    (tmp_path / "redis.sock").write_text("mine")
    url = start_redis(supervisor, tmp_path)
    assert asyncio.run(ask(url, "PING")) in (b"PONG", True)
    assert (tmp_path / "redis.sock").read_text() == "mine"
