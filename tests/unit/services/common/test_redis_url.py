"""Which URLs mean which servers, and which part of a wrong one an error names."""

from urllib.parse import SplitResult, urlsplit

import pytest

from tandem_engine.base.addresses import Address
from tandem_engine.base.errors import ConfigError
from tandem_services.common import redis_url
from tandem_services.common.redis_client import RedisAddress
from tandem_services.common.redis_url import Kind, RedisUrl


@pytest.mark.parametrize(
    ("url", "kind", "tls", "addresses", "service", "database"),
    [
        ("redis://h", Kind.SERVER, False, "h:6379", "", 0),
        ("rediss://h:7/2", Kind.SERVER, True, "h:7", "", 2),
        ("redis://[::1]:7/", Kind.SERVER, False, "[::1]:7", "", 0),
        ("redis+cluster://a,b:7,[::1]", Kind.CLUSTER, False, "a:6379 b:7 [::1]:6379", "", 0),
        ("rediss+cluster://a/0", Kind.CLUSTER, True, "a:6379", "", 0),
        ("redis+sentinel://a,b:7/main", Kind.SENTINEL, False, "a:26379 b:7", "main", 0),
        ("rediss+sentinel://a/main/3", Kind.SENTINEL, True, "a:26379", "main", 3),
        ("unix:///run/redis.sock?db=1", Kind.SOCKET, False, "", "", 1),
        ("unix:///home/me@here/redis.sock", Kind.SOCKET, False, "", "", 0),
    ],
)
def test_url_parses_to_kind_servers_and_database(url, kind, tls, addresses, service, database):
    read = RedisUrl.parse(url)
    assert (read.kind, read.tls, read.service, read.database) == (kind, tls, service, database)
    assert read.addresses == tuple(map(Address.parse, addresses.split()))


def test_several_hosts_with_brackets_need_no_old_urlsplit(monkeypatch):
    """Newer releases of Python refuse them."""

    def newer(text: str) -> SplitResult:
        parts = urlsplit(text)
        if "[" in parts.netloc and "," in parts.netloc:
            raise ValueError("Invalid IPv6 URL")
        return parts

    monkeypatch.setattr(redis_url, "urlsplit", newer)
    read = RedisUrl.parse("redis+cluster://me:p@a,[::1]:7,[::2]")
    assert [*map(str, read.addresses)] == ["a:6379", "[::1]:7", "[::2]:6379"]
    assert (read.username, read.password) == ("me", "p")


def test_user_and_a_password_are_decoded():
    read = RedisUrl.parse("redis+sentinel://us%40er:p%2Fw@a,b/main")
    assert (read.username, read.password) == ("us@er", "p/w")
    assert "p/w" not in repr(read)


REFUSED = {
    "http://h": "starts with",
    "redis+sentinels://h/main": "starts with",
    "redis://": "host is missing",
    "redis+cluster://a,": "host is missing",
    "redis://:6379": "host is missing",
    "redis://a,b": "several hosts",
    "redis://h:port": "host or port",
    "redis://h:70000": "host or port",
    "redis://h:0": "port 0",
    "redis://fe80::1:6379": "host or port",
    "redis://h/main": "database 'main'",
    "redis://h/-1": "database '-1'",
    "redis://h/0/1": "1 parts too many",
    "redis+cluster://h/1": "database 0 alone",
    "redis+sentinel://h": "service is missing",
    "redis+sentinel://h/main/x": "database 'x'",
    "redis://h/0#x": "after #",
    "redis://h?ssl_ca_certs=/ca.pem": "ssl_ca_certs is for TLS",
    "rediss://h?ssl_ca_cert=/ca.pem": "'ssl_ca_cert' is unknown",
    "rediss://h?ssl_check_hostname=maybe": "ssl_check_hostname must be true or false",
    "rediss://h?ssl_ca_certs=": "ssl_ca_certs must be given",
    "redis://h?password=secret": "--redis-password-file",
    "redis://h?sentinel_username=me": "'sentinel_username' is unknown",
    "redis+sentinel://h/main?sentinel_username=me": "needs sentinel_password_file",
    "rediss://h?ssl_keyfile=/k.pem": "ssl_keyfile needs ssl_certfile",
    "rediss://h?ssl_ca_certs=/a.pem&ssl_ca_certs=/b.pem": "ssl_ca_certs is given twice",
    "rediss://h?ssl_cert_reqs=none&ssl_check_hostname=true": "omit ssl_cert_reqs=none",
    "unix://": "path of the socket",
    "unix:///s?db=x": "database 'x'",
    "redis://u:sec/ret@h": "%-encoded",
    "redis://u:sec#ret@h": "%-encoded",
    "redis://u:sec?ret@h": "%-encoded",
}


@pytest.mark.parametrize("url", REFUSED)
def test_wrong_url_is_refused_by_its_part(url):  # [config-refused]
    with pytest.raises(ConfigError) as caught:
        RedisUrl.parse(url)
    message = str(caught.value)
    assert message.startswith("--redis-url ")
    assert REFUSED[url] in message
    assert not any(secret in message for secret in ("secret", "sec/ret", "sec#ret", "sec?ret"))


@pytest.mark.parametrize("option", ["rediss://h?ssl_ca_certs", "redis+sentinel://h/m?sentinel_password_file"])
def test_file_that_a_url_names_must_exist(option, tmp_path):
    with pytest.raises(ConfigError, match=f"{option.partition('?')[2]} .*: no such file"):
        RedisAddress(url=f"{option}={tmp_path / 'absent'}")
