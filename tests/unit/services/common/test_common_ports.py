"""Ports that stay free until a process listens on them."""

import socket

import pytest

from tandem_services.common import ports
from tandem_services.common.errors import StartupError


def test_a_port_is_found_below_those_of_outgoing_connections():
    port = ports.free_port()
    assert port in ports.PORTS
    assert ports.PORTS.stop <= 32_768


def test_no_port_is_given_twice_though_nobody_listens_on_the_first_yet(monkeypatch):
    """Two processes of a fleet were told to listen on the same port, and one of them did not start."""
    first = ports.free_port()
    monkeypatch.setattr(ports.random, "sample", lambda *_: [first])
    with pytest.raises(StartupError, match="no free port"):
        ports.free_port()


def test_a_taken_port_is_passed_over(monkeypatch):
    # Other tests listen on ports beside it: one of so many is free.
    others = [ports.free_port() for _ in range(20)]
    with socket.create_server(("127.0.0.1", ports.free_port())) as server:
        taken = server.getsockname()[1]
        monkeypatch.setattr(ports, "_given", set())
        monkeypatch.setattr(ports.random, "sample", lambda *_: [taken, *others])
        assert ports.free_port() in {*others} - {taken}
        monkeypatch.setattr(ports.random, "sample", lambda *_: [taken])
        with pytest.raises(StartupError, match="no free port"):
            ports.free_port()
