"""The Host headers that a port accepts: protection against DNS rebinding.

A page in a browser can reach any address that the browser reaches, once the page's own name resolves to that address;
the browser then treats the responses as the page's own. The Host header still contains the page's name, so a port that
accepts only its own names is useless to the page.

Names that an outsider cannot register are always accepted:

    IP addresses                         probes of Kubernetes, Prometheus, clients within a network
    localhost, *.localhost               this machine and port-forwards
    names without a dot                  this machine's, those of /etc/hosts, Services of the same namespace
    *.svc, *.svc.CLUSTER-DOMAIN          Services; the domain is cluster.local and those of /etc/resolv.conf
    this machine's full name             if the port is not on loopback
    --host, if it is a name

Any other name must be listed: `--allowed-hosts llm.example.com *.corp.example`, or `*` for all.
"""

import re
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tandem_engine.base.addresses import Address, AddressError, bare_host, ip_of, is_loopback
from tandem_engine.base.errors import ConfigError

ANY = "*"

MAX_KNOWN = 256
"""Headers of which it is remembered whether they are allowed."""

RESOLVER = Path("/etc/resolv.conf")
CLUSTER_SUFFIXES = (".svc", ".svc.cluster.local")
_PATTERN = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9_-]{0,62})(\.[a-z0-9_-]{1,63}){0,20}")


@dataclass(frozen=True, kw_only=True, slots=True)
class AllowedHosts:
    """Of one port."""

    names: frozenset[str] = frozenset()
    """In lower case."""
    suffixes: tuple[str, ...] = CLUSTER_SUFFIXES
    """Each begins with a dot; names that end with one are allowed."""
    everything: bool = False
    _known: dict[str, bool] = field(default_factory=dict, init=False, repr=False, compare=False)
    """By header: clients of a port repeat a few, and to read an address takes as long as to route a request."""

    @classmethod
    def of(cls, patterns: Iterable[str], *, listening: Iterable[str]) -> "AllowedHosts":
        """What is always allowed, and `patterns`: names, *.NAME, or * for any.

        `listening`: the hosts that the port listens on. Raises `ConfigError` for what is no pattern.
        """
        patterns = [pattern.strip().lower().rstrip(".") for pattern in patterns]
        for pattern in patterns:
            if pattern != ANY and not _PATTERN.fullmatch(pattern) and ip_of(pattern) is None:
                raise ConfigError(
                    f"--allowed-hosts takes names without a port, such as llm.example.com or *.example.com, or * for "
                    f"any, got {pattern[:200]!r}"
                )
        listening = [bare_host(host) for host in listening]
        names = {host.lower() for host in listening if ip_of(host) is None}
        if not all(map(is_loopback, listening)):
            names |= {socket.gethostname().lower(), socket.getfqdn().lower().rstrip(".")}
        return cls(
            names=frozenset(names | {pattern for pattern in patterns if not pattern.startswith("*")}) - {""},
            suffixes=(
                *CLUSTER_SUFFIXES,
                *_search_suffixes(RESOLVER),
                *(pattern[1:] for pattern in patterns if pattern.startswith("*.")),
            ),
            everything=ANY in patterns,
        )

    def allow(self, header: str) -> bool:
        """Whether a request with this Host header is for this port."""
        known = self._known.get(header)
        if known is None:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            known = self._known[header] = self.everything or self._allows(header)
        return known

    def _allows(self, header: str) -> bool:
        try:
            host = _host_of(header)
        except AddressError:
            return False
        if ip_of(host) is not None or host == "localhost" or host.endswith(".localhost"):
            return True
        return "." not in host or host in self.names or host.endswith(self.suffixes)


def _host_of(header: str) -> str:
    """The name or address in a Host header, in lower case. Raises `AddressError`."""
    text = header.strip().lower()
    if text.startswith("[") and text.endswith("]"):
        return bare_host(text)
    host = Address.parse(text).host if ":" in text else bare_host(text)
    host = host.rstrip(".")
    if not host:
        raise AddressError("an empty name")
    return host


def _search_suffixes(resolver: Path) -> Iterator[str]:
    """`.svc.DOMAIN` where this is a pod of a cluster with another domain than cluster.local."""
    try:
        lines = resolver.read_text("utf-8", "replace").splitlines()
    except OSError:
        return
    for line in lines:
        words = line.lower().split()
        if words[:1] == ["search"]:
            yield from (f".{word.rstrip('.')}" for word in words[1:] if word.startswith("svc."))
