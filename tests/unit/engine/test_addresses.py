"""One type reads and writes hosts and ports, with IPv6 addresses in brackets."""

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_engine.base.addresses import (
    Address,
    AddressError,
    bare_host,
    ip_of,
    is_loopback,
    is_wildcard,
    loopback_beside,
    reachable_here,
)

ZONES = st.sampled_from(["", "%eth0", "%net1.100"])
IPV6 = st.builds(lambda ip, zone: f"{ip}{zone}", st.ip_addresses(v=6), ZONES)
NAMES = st.from_regex(r"[a-z][a-z0-9-]{0,20}(\.[a-z0-9]{1,10}){0,3}", fullmatch=True)
HOSTS = st.one_of(st.ip_addresses(v=4).map(str), IPV6, NAMES)
PORTS = st.integers(0, 65535)


@given(HOSTS, PORTS)
def test_text_and_endpoint_of_an_address_read_back_equal(host: str, port: int) -> None:
    address = Address(host, port)
    assert Address.parse(str(address)) == address
    assert Address.of_endpoint(address.endpoint) == address


@given(st.text(max_size=40))
def test_any_text_is_an_address_or_an_address_error(text: str) -> None:
    try:
        address = Address.parse(text)
    except AddressError:
        return
    assert Address.parse(str(address)) == address


@pytest.mark.parametrize(
    ("host", "text", "url"),
    [
        ("10.0.0.7", "10.0.0.7:8000", "http://10.0.0.7:8000/live"),
        ("::1", "[::1]:8000", "http://[::1]:8000/live"),
        ("[fd00::7]", "[fd00::7]:8000", "http://[fd00::7]:8000/live"),
        ("fe80::1%eth0", "[fe80::1%eth0]:8000", "http://[fe80::1%25eth0]:8000/live"),
        ("gateway.svc", "gateway.svc:8000", "http://gateway.svc:8000/live"),
    ],
)
def test_ipv6_hosts_are_written_in_brackets(host: str, text: str, url: str) -> None:
    assert str(Address(host, 8000)) == text
    assert Address(host, 8000).url("/live") == url
    assert Address(host, 8000).endpoint == f"tcp://{text}"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "8000",
        ":8000",
        "::1:8000",
        "[::1]",
        "[::1]:",
        "[::1:8000",
        "[10.0.0.7]:80",
        "a b:80",
        "a:80000",
        "a:-1",
        "a:+1",
    ],
)
def test_text_that_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(AddressError):
        Address.parse(text)


@pytest.mark.parametrize("endpoint", ["10.0.0.7:80", "ipc:///run/x", "tcp://", "tcp://*:80/x", "tcp://a;b:80"])
def test_endpoint_that_is_no_tcp_address_is_refused(endpoint: str) -> None:
    with pytest.raises(AddressError):
        Address.of_endpoint(endpoint)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "::ffff:127.0.0.1", "localhost"])
def test_loopback_hosts_are_recognized(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["10.0.0.7", "fd00::7", "::", "0.0.0.0", "example.org", ""])
def test_other_hosts_are_not_loopback(host: str) -> None:
    assert not is_loopback(host)


def test_wildcards_are_recognized_in_every_spelling() -> None:
    assert all(map(is_wildcard, ["", "::", "[::]", "0.0.0.0", "0:0:0:0:0:0:0:0"]))
    assert not is_wildcard("::1")


@pytest.mark.parametrize(
    ("host", "inner", "here"),
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("::1", "::1", "::1"),
        ("fd00::7", "::1", "fd00::7"),
        ("::", "127.0.0.1", "::1"),
        ("0.0.0.0", "127.0.0.1", "127.0.0.1"),
    ],
)
def test_loopback_addresses_follow_the_family_of_the_host(host: str, inner: str, here: str) -> None:
    assert loopback_beside(host) == inner
    assert reachable_here(host) == here


def test_hosts_for_the_operating_system_have_no_brackets() -> None:
    assert bare_host("[::1]") == "::1"
    assert socket.getaddrinfo(bare_host("[::1]"), 80, type=socket.SOCK_STREAM)
    assert str(ip_of("[::1]")) == "::1"
    assert ip_of("worker.example") is None
