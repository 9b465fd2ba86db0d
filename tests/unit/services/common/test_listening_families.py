"""Listeners at IPv6 addresses, and at all addresses of both families."""

import socket

import pytest

from tandem_services.common.errors import StartupError
from tandem_services.common.sockets import free_port, listen


@pytest.mark.parametrize("host", ["::", "[::]", ""])
def test_wildcard_listener_takes_clients_of_both_families(host) -> None:
    with listen(host, 0) as listener:
        port = listener.getsockname()[1]
        for address in ("127.0.0.1", "::1"):
            socket.create_connection((address, port), timeout=30).close()


def test_wildcard_listener_without_ipv6_takes_ipv4(monkeypatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with listen("::", 0) as listener:
        assert listener.family is socket.AF_INET


def test_taken_ipv6_address_is_named_in_brackets() -> None:
    with listen("::1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(StartupError, match=rf"cannot listen on \[::1\]:{port} "):
            listen("::1", port)


@pytest.mark.parametrize("host", ["::1::80", "a b", "[::1"])
def test_host_that_is_no_address_is_refused(host) -> None:
    with pytest.raises(StartupError, match="choose another --host or --port"):
        listen(host, 0)
    with pytest.raises(StartupError, match="--host"):
        free_port(host)


def test_free_port_is_free_at_an_ipv6_address() -> None:
    listen("::1", free_port("::1")).close()
