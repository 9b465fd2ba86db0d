import pytest

from tandem_engine.base.errors import ConfigError
from tandem_services.common.redis_client import (
    BreakerState,
    CircuitBreaker,
    RarelyLogged,
    RedisAddress,
    RedisClient,
    RedisUnavailableError,
)
from tandem_services.common.redis_places import FilePassword
from tandem_services.common.redis_url import mask_password
from tandem_testing.service_clock import ServiceClock


@pytest.fixture
def clock():
    return ServiceClock()


@pytest.fixture
def breaker(clock):
    return CircuitBreaker(clock=clock, failures_to_open=3, open_s=0.5)


def test_breaker_opens_after_failures_in_a_row(breaker):
    for _ in range(2):
        breaker.failed()
        assert breaker.admit()
    breaker.failed()
    assert breaker.state is BreakerState.OPEN
    assert not breaker.admit()


def test_success_in_between_starts_the_count_again(breaker):
    for _ in range(5):
        breaker.failed()
        breaker.failed()
        breaker.succeeded()
    assert breaker.state is BreakerState.CLOSED


def test_half_open_admits_one_command_at_a_time(breaker, clock):
    for _ in range(3):
        breaker.failed()
    clock.advance(0.5)
    assert breaker.admit()
    assert breaker.state is BreakerState.HALF_OPEN
    assert not breaker.admit()


def test_half_open_command_sets_the_circuit_state(breaker, clock):
    for _ in range(3):
        breaker.failed()
    clock.advance(0.5)
    breaker.admit()
    breaker.failed()
    assert not breaker.admit()
    clock.advance(0.5)
    breaker.admit()
    breaker.succeeded()
    assert breaker.admit()
    assert breaker.admit()


def test_trial_that_never_reports_back_does_not_lock_the_breaker(breaker, clock):
    for _ in range(3):
        breaker.failed()
    clock.advance(0.5)
    assert breaker.admit()
    clock.advance(0.5)
    assert breaker.admit()


@pytest.mark.parametrize(
    ("url", "masked"),
    [
        ("redis://user:secret@host:6379/0", "redis://user:***@host:6379/0"),
        ("redis://:secret@host", "redis://:***@host"),
        ("rediss://h:1/2?password=secret", "rediss://h:1/2"),
        ("redis://a:b@c:d@host:1", "redis://a:***@host:1"),
        ("redis://a:b/c#d@host:1", "redis://a:***@host:1"),
        ("unix:///run/redis.sock", "unix:///run/redis.sock"),
    ],
)
def test_passwords_are_masked(url, masked):
    assert mask_password(url) == masked


def test_address_never_shows_its_password():
    address = RedisAddress(url="redis://user:secret@host:6379/0")
    assert "secret" not in f"{address} {address!r}"


@pytest.mark.parametrize(
    "url", ["http://me:secret@host", "host:6379", "", "redis://host:port", "redis://u:sec/secret@h:1"]
)
def test_invalid_redis_url_is_rejected_without_its_password(url):  # [config-refused]
    with pytest.raises(ConfigError) as caught:
        RedisAddress(url=url)
    assert "secret" not in str(caught.value)
    assert "--redis" in str(caught.value)


def test_password_file_is_read_at_each_connect(tmp_path):  # [secrets-reread]
    path = tmp_path / "password"
    path.write_text("first\n")
    provider = FilePassword(username="me", path=path)
    assert provider.get_credentials() == ("me", "first")
    path.write_text("second")
    assert provider.get_credentials() == ("me", "second")
    assert FilePassword(username=None, path=path).get_credentials() == ("second",)


def test_password_can_move_from_the_url_to_a_private_file(tmp_path):  # [secrets-in-files]
    path = tmp_path / "password"
    path.touch(mode=0o644)
    authority = tmp_path / "ca.pem"
    authority.touch()
    moved = RedisAddress(url=f"rediss://us%40er:p%2Fw@h:6380/1?ssl_ca_certs={authority}").with_password_in(path)
    assert (moved.url, moved.password_file) == (f"rediss://us%40er@h:6380/1?ssl_ca_certs={authority}", path)
    several = RedisAddress(url="redis+sentinel://me:p%2Fw@h,[::1]:7/main/2").with_password_in(path)
    assert several.url == "redis+sentinel://me@h,[::1]:7/main/2"
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("p/w", 0o600)
    plain = RedisAddress(url="redis://h")
    assert plain.with_password_in(path) is plain


def test_absent_password_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="redis-password-file"):
        RedisAddress(url="redis://h", password_file=tmp_path / "absent")


async def test_refused_connection_counts_and_then_costs_nothing(clock):
    client = RedisClient(RedisAddress(url="redis://127.0.0.1:1"), timeout_s=1, breaker=CircuitBreaker(clock=clock))
    for _ in range(10):
        with pytest.raises(RedisUnavailableError):
            await client.command("PING")
    assert client.failures == 3
    assert not client.available
    await client.close()


def test_redis_error_logs_are_limited_and_counted(clock, caplog):
    log = RarelyLogged(clock=clock)
    for _ in range(5):
        log.warning("broken")
    assert len(caplog.records) == 1
    clock.advance(61)
    log.warning("broken")
    assert "4 similar" in caplog.records[-1].getMessage()


async def test_transport_closed_during_command_is_redis_unavailable(monkeypatch):  # [redis-is-optional]
    """uvloop raises RuntimeError, which is no error of redis-py's; a gateway runs on it and answered 500."""
    client = RedisClient(RedisAddress(url="redis://127.0.0.1:1/0"), timeout_s=1.0)

    async def closed(*_: object, within_s: float) -> None:
        raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")

    monkeypatch.setattr(client._line, "command", closed)
    with pytest.raises(RedisUnavailableError, match="the handler is closed"):
        await client.command("PING")
    assert client.failures == 1
    await client.close()
