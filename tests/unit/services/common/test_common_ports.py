"""Ports that stay free until a process listens on them."""

import socket

import pytest

from tandem_services.common import sockets
from tandem_services.common.errors import StartupError


def test_port_is_found_below_those_of_outgoing_connections():
    port = sockets.free_port()
    assert port in sockets.PORTS
    assert sockets.PORTS.stop <= 32_768


def test_free_port_is_not_returned_twice(monkeypatch):
    """Two processes of a fleet got the same port to listen on, and one of them did not start."""
    first = sockets.free_port()
    monkeypatch.setattr(sockets.random, "sample", lambda *_: [first])
    with pytest.raises(StartupError, match="no free port"):
        sockets.free_port()


def test_taken_port_is_passed_over(monkeypatch):
    # Other tests listen on ports beside it: one of so many is free.
    others = [sockets.free_port() for _ in range(20)]
    with socket.create_server(("127.0.0.1", sockets.free_port())) as server:
        taken = server.getsockname()[1]
        monkeypatch.setattr(sockets, "_given", set())
        monkeypatch.setattr(sockets.random, "sample", lambda *_: [taken, *others])
        assert sockets.free_port() in {*others} - {taken}
        monkeypatch.setattr(sockets.random, "sample", lambda *_: [taken])
        with pytest.raises(StartupError, match="no free port"):
            sockets.free_port()
