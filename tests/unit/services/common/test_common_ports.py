"""Ports that stay free until a process listens on them."""

import socket

import pytest

from tandem_services.common import ports
from tandem_services.common.errors import StartupError


def test_a_port_is_found_below_those_of_outgoing_connections():
    port = ports.free_port()
    assert port in ports.PORTS
    assert ports.PORTS.stop <= 32_768


def test_a_taken_port_is_passed_over(monkeypatch):
    with socket.create_server(("127.0.0.1", ports.free_port())) as server:
        taken = server.getsockname()[1]
        monkeypatch.setattr(ports.random, "sample", lambda *_: [taken, taken + 1])
        assert ports.free_port() == taken + 1
        monkeypatch.setattr(ports.random, "sample", lambda *_: [taken])
        with pytest.raises(StartupError, match="no free port"):
            ports.free_port()
