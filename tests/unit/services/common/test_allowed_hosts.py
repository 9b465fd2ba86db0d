"""Host headers that a port answers."""

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_engine.base.errors import ConfigError
from tandem_services.common import allowed_hosts
from tandem_services.common.allowed_hosts import AllowedHosts

ALWAYS = [
    "127.0.0.1",
    "10.0.0.7:8000",
    "[::1]:8000",
    "[fd00::7]",
    "localhost",
    "LOCALHOST:8000",
    "app.localhost:8000",
    "gateway",
    "gateway:8000",
    "chat-gateway.models.svc",
    "chat-gateway.models.svc.cluster.local:80",
    "chat-gateway.models.svc.cluster.local.",
]
NEVER = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "chat-gateway.models.svc.evil.example",
    "evil-svc.example",
    "llm.example.com",
    "",
    ":8000",
    "a b",
    "::1::1",
    "[::1",
    "evil.example@localhost",
    "localhost/evil.example",
]


@pytest.mark.parametrize("host", ALWAYS)
def test_unregistrable_host_names_are_allowed(host) -> None:
    assert AllowedHosts.of((), listening=("127.0.0.1",)).allow(host)


@pytest.mark.parametrize("host", NEVER)
def test_other_names_are_refused(host) -> None:
    assert not AllowedHosts.of((), listening=("127.0.0.1",)).allow(host)


def test_names_of_the_flag_are_allowed() -> None:
    hosts = AllowedHosts.of(("LLM.example.com", "*.corp.example"), listening=("::",))
    assert hosts.allow("llm.example.com:443")
    assert hosts.allow("chat.corp.example")
    assert not hosts.allow("corp.example")
    assert not hosts.allow("evilcorp.example")
    assert not hosts.allow("x.llm.example.com")


def test_star_allows_every_name() -> None:
    assert AllowedHosts.of(("*",), listening=("::",)).allow("evil.example")


@pytest.mark.parametrize("pattern", ["llm.example.com:443", "http://llm", "*.*", "a*b", "", "a b"])
def test_pattern_that_is_no_name_is_refused(pattern) -> None:
    with pytest.raises(ConfigError, match="--allowed-hosts"):
        AllowedHosts.of((pattern,), listening=("127.0.0.1",))


def test_full_name_of_the_machine_is_allowed_off_loopback(monkeypatch) -> None:
    monkeypatch.setattr(socket, "getfqdn", lambda: "gpu1.lab.example")
    assert AllowedHosts.of((), listening=("0.0.0.0",)).allow("gpu1.lab.example:8000")
    assert not AllowedHosts.of((), listening=("127.0.0.1",)).allow("gpu1.lab.example:8000")


def test_name_that_the_port_listens_on_is_allowed() -> None:
    assert AllowedHosts.of((), listening=("node.lab.example",)).allow("node.lab.example")


def test_services_of_another_cluster_domain_are_allowed(monkeypatch, tmp_path) -> None:
    resolver = tmp_path / "resolv.conf"
    resolver.write_text("nameserver 10.96.0.10\nsearch models.svc.k8s.corp svc.k8s.corp k8s.corp\n")
    monkeypatch.setattr(allowed_hosts, "RESOLVER", resolver)
    hosts = AllowedHosts.of((), listening=("::",))
    assert hosts.allow("chat-gateway.models.svc.k8s.corp")
    assert not hosts.allow("other.k8s.corp")


@given(st.text(max_size=60))
def test_any_header_is_allowed_or_refused(header: str) -> None:
    assert AllowedHosts().allow(header) in (True, False)
