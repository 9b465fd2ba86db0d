"""What a Redis URL means: one server, a cluster, a primary that Sentinels name, or a Unix socket.

    redis://[user[:password]@]host[:port][/database]                     one server, or a node of a cluster
    redis+cluster://[user[:password]@]host[:port],…                      a cluster; any of its nodes
    redis+sentinel://[user[:password]@]host[:port],…/service[/database]  Sentinels; the user is that of the primary
    unix://[user[:password]@]/path[?db=number]
    rediss://, rediss+cluster://, rediss+sentinel://                     the same over TLS

Each part is implemented or refused by its name. No message contains a password.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from tandem_engine.base.addresses import Address, AddressError
from tandem_engine.base.errors import ConfigError

PORT = 6379
SENTINEL_PORT = 26379


class Kind(StrEnum):
    SERVER = "redis"
    CLUSTER = "redis+cluster"
    SENTINEL = "redis+sentinel"
    SOCKET = "unix"


SCHEMES: Mapping[str, tuple[Kind, bool]] = {
    "redis": (Kind.SERVER, False),
    "rediss": (Kind.SERVER, True),
    "redis+cluster": (Kind.CLUSTER, False),
    "rediss+cluster": (Kind.CLUSTER, True),
    "redis+sentinel": (Kind.SENTINEL, False),
    "rediss+sentinel": (Kind.SENTINEL, True),
    "unix": (Kind.SOCKET, False),
}
"""With whether the connection is over TLS."""

TLS_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
TLS_OPTIONS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(TLS_FILES, ()),
    "ssl_check_hostname": ("true", "false"),
    "ssl_cert_reqs": ("required", "optional", "none"),
}
"""Options of a URL over TLS, with their values; none: a file."""

SENTINEL_OPTIONS = ("sentinel_username", "sentinel_password_file")
SOCKET_OPTIONS = ("db",)
NEEDED: Mapping[str, str] = {"sentinel_username": "sentinel_password_file", "ssl_keyfile": "ssl_certfile"}
"""Options that mean nothing without another one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RedisUrl:
    """The parts of a URL."""

    kind: Kind
    tls: bool = False
    addresses: tuple[Address, ...] = ()
    """Of the server, of nodes of the cluster, or of the Sentinels."""
    path: str = ""
    """Of the socket."""
    service: str = ""
    """The name that Sentinels have for the primary."""
    database: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    options: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, url: str) -> "RedisUrl":
        """Raises `ConfigError` that names the part which is wrong."""
        try:
            authority, parts = split_url(url)
            kind, tls = SCHEMES[parts.scheme]
        except (ValueError, KeyError):
            schemes = ", ".join(f"{scheme}://" for scheme in SCHEMES)
            raise _refused(url, f"a Redis URL starts with one of {schemes}: redis://user@host:6379/0") from None
        misplaced = parts.path + parts.query + parts.fragment
        if "@" in misplaced and not (kind is Kind.SOCKET and not authority.hosts):
            raise _refused(url, "special characters of a password must be %-encoded")
        if parts.fragment:
            raise _refused(url, "it has a part after #, which means nothing here")
        options = _options(url, kind, tls, parts.query)
        place = unquote(parts.path) if kind is Kind.SOCKET else parts.path
        service, database = _service_and_database(url, kind, place, options)
        return cls(
            kind=kind,
            tls=tls,
            addresses=() if kind is Kind.SOCKET else _addresses(url, kind, authority.hosts),
            path=place if kind is Kind.SOCKET else "",
            service=service,
            database=database,
            username=unquote(authority.username) or None,
            password=unquote(authority.password) or None,
            options=options,
        )

    @property
    def files(self) -> dict[str, Path]:
        """Files that the options name."""
        names = (*TLS_FILES, "sentinel_password_file")
        return {name: Path(self.options[name]) for name in names if name in self.options}


class Authority(NamedTuple):
    """What precedes the path of a URL, as it is encoded there."""

    username: str
    password: str
    hosts: str


def split_url(url: str) -> tuple[Authority, SplitResult]:
    """The authority, and the other parts. Raises `ValueError` for what is no URL.

    urlsplit has no URLs with several hosts: newer releases of Python refuse those of which one has brackets.
    """
    start = url.index("://") + len("://")
    end = min(found if (found := url.find(mark, start)) >= 0 else len(url) for mark in "/?#")
    credentials, _, hosts = url[start:end].rpartition("@")
    username, _, password = credentials.partition(":")
    return Authority(username, password, hosts), urlsplit(url[:start] + url[end:])


def mask_password(url: str) -> str:
    """`url` without its password and without its options, which may hold one too.

    Everything before the last @ counts as credentials, so that a password with a stray / or # stays hidden.
    """
    scheme, separator, rest = url.partition("://")
    credentials, at, place = rest.rpartition("@")
    if ":" in credentials:
        credentials = credentials.partition(":")[0] + ":***"
    return scheme + separator + credentials + at + place.partition("?")[0]


def _refused(url: str, why: str) -> ConfigError:
    return ConfigError(f"--redis-url {mask_password(url)}: {why}")


def _addresses(url: str, kind: Kind, text: str) -> tuple[Address, ...]:
    hosts = text.split(",")
    if len(hosts) > 1 and kind is Kind.SERVER:
        raise _refused(url, "several hosts are for redis+cluster:// and redis+sentinel://; redis:// has one")
    return tuple(_address(url, host, SENTINEL_PORT if kind is Kind.SENTINEL else PORT) for host in hosts)


def _address(url: str, text: str, port: int) -> Address:
    """`text` is HOST or HOST:PORT."""
    if not text or text.startswith(":"):
        raise _refused(url, "a host is missing, as in redis://HOST:6379/0")
    has_port = ":" in text.rpartition("]")[2]
    try:
        address = Address.parse(text) if has_port else Address(text, port)
    except AddressError as error:
        raise _refused(url, f"its host or port cannot be read: {error}") from None
    if address.port == 0:
        raise _refused(url, "port 0 is no port of a server")
    return address


def _service_and_database(url: str, kind: Kind, path: str, options: Mapping[str, str]) -> tuple[str, int]:
    if kind is Kind.SOCKET:
        if not path:
            raise _refused(url, "the path of the socket is missing, as in unix:///run/redis.sock")
        return "", _database(url, options.get("db", ""))
    words = path.removeprefix("/").split("/")
    service = ""
    if kind is Kind.SENTINEL:
        service = unquote(words.pop(0))
        if not service:
            raise _refused(url, "the service is missing, as in redis+sentinel://HOST:26379/SERVICE")
    if len(words) > 1:
        raise _refused(url, f"its path has {len(words) - 1} parts too many")
    database = _database(url, words[0] if words else "")
    if kind is Kind.CLUSTER and database != 0:
        raise _refused(url, NO_DATABASES)
    return service, database


NO_DATABASES = "a Redis Cluster has database 0 alone: omit the number, and separate deployments with --cluster"


def _database(url: str, text: str) -> int:
    if text and not (text.isascii() and text.isdigit() and len(text) < 10):
        raise _refused(url, f"database {text[:40]!r} is not a number")
    return int(text or "0")


def _options(url: str, kind: Kind, tls: bool, query: str) -> dict[str, str]:
    known = (
        *(TLS_OPTIONS if tls else ()),
        *(SENTINEL_OPTIONS if kind is Kind.SENTINEL else ()),
        *(SOCKET_OPTIONS if kind is Kind.SOCKET else ()),
    )
    options: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name == "password":
            raise _refused(url, "option password: put the password in a file and name it with --redis-password-file")
        if name in TLS_OPTIONS and not tls:
            raise _refused(url, f"option {name} is for TLS: a URL with rediss")
        if name not in known:
            choice = f"known are {', '.join(known)}" if known else "this URL has no options"
            raise _refused(url, f"option {name[:40]!r} is unknown; {choice}")
        values = TLS_OPTIONS.get(name, ())
        if not value or (values and value not in values):
            raise _refused(url, f"option {name} must be {' or '.join(values) or 'given a value'}")
        if name in options:
            raise _refused(url, f"option {name} is given twice")
        options[name] = value
    for name, needed in NEEDED.items():
        if name in options and needed not in options:
            raise _refused(url, f"option {name} needs {needed}")
    if options.get("ssl_cert_reqs") == "none" and options.get("ssl_check_hostname") == "true":
        raise _refused(url, "option ssl_check_hostname=true needs a certificate: omit ssl_cert_reqs=none")
    return options
