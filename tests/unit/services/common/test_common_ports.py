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
    taken, other = ports.free_port(), ports.free_port()
    monkeypatch.setattr(ports, "_given", set())
    with socket.create_server(("127.0.0.1", taken)):
        monkeypatch.setattr(ports.random, "sample", lambda *_: [taken, other])
        assert ports.free_port() == other
        monkeypatch.setattr(ports.random, "sample", lambda *_: [taken])
        with pytest.raises(StartupError, match="no free port"):
            ports.free_port()
