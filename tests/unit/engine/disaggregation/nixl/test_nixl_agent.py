"""NIXL that is absent or cannot start is one clear sentence, not a traceback of somebody else's; and one of its errors
keeps nothing else from being given back."""

import socket
import sys
import types

import pytest

from tandem_engine.disaggregation.nixl import agent
from tandem_engine.disaggregation.nixl.agent import NixlAgent
from tandem_engine.disaggregation.nixl.interfaces import Interfaces
from tandem_engine.disaggregation.nixl.layout import Region
from tandem_engine.errors import TransferError, TransportUnavailableError
from tandem_testing.scheduler_builders import ManualClock


def test_a_missing_library_names_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(TransportUnavailableError, match="pip install nixl"):
        NixlAgent("w@1", Region(0, 64, 2, "DRAM", 0), Interfaces(clock=ManualClock()))


def test_memory_that_cannot_be_registered_is_reported():
    with pytest.raises(TransportUnavailableError, match="UCX backend on FILE"):
        NixlAgent("w@1", Region(0, 64, 2, "FILE", 0), Interfaces(clock=ManualClock()))


class RefusingNixl:
    """nixl_agent that gives no list of pages and no memory back."""

    def __init__(self, name: str, config: object) -> None:
        self.calls: list[str] = []

    def register_memory(self, ranges: object, device: str) -> str:
        return "memory"

    def get_agent_metadata(self) -> bytes:
        return b"mine"

    def prep_xfer_dlist(self, name: str, pages: object, device: str) -> str:
        return f"pages of {name}"

    def add_remote_agent(self, metadata: bytes) -> bytes:
        self.calls.append("add")
        return metadata

    def release_dlist_handle(self, handle: str) -> None:
        raise RuntimeError(f"{handle} stay")

    def remove_remote_agent(self, name: str) -> None:
        self.calls.append(f"remove {name}")

    def deregister_memory(self, registered: str) -> None:
        self.calls.append(f"deregister {registered}")


@pytest.fixture
def refusing(monkeypatch):
    """An agent over `RefusingNixl`, and its clock stands still."""
    api = types.SimpleNamespace(nixl_agent=RefusingNixl, nixl_agent_config=lambda **_: None)
    monkeypatch.setitem(sys.modules, "nixl", types.SimpleNamespace(_api=api, _bindings=object()))
    monkeypatch.setitem(sys.modules, "nixl._api", api)
    monkeypatch.setitem(sys.modules, "nixl._bindings", object())
    monkeypatch.setattr(agent, "_error_types", lambda _: (RuntimeError,))
    region = Region(0, 64, 2, "DRAM", 0)
    return NixlAgent("w@1", region, Interfaces(frozenset({"lo"}), clock=ManualClock())), region


def test_a_peer_is_removed_though_its_pages_are_not_given_back(refusing, caplog):  # T60
    here, region = refusing
    here.add_peer("p@1", b"p@1", region)
    here.remove_peer("p@1")
    assert here._agent.calls == ["add", "remove p@1"]
    assert "giving back the pages of peer 'p@1' failed: pages of p@1 stay" in caplog.text


def test_memory_is_deregistered_though_its_pages_are_not_given_back(refusing, caplog):
    here, _ = refusing
    calls = here._agent.calls
    here.close()
    assert calls == ["deregister memory"]
    assert "giving back the pages of KV memory failed" in caplog.text


def test_a_peer_is_connected_to_only_after_a_fresh_look_at_the_interfaces(refusing, monkeypatch):
    """The last one was a moment ago, and found nothing wrong."""
    here, region = refusing
    here.add_peer("p@1", b"p@1", region)
    monkeypatch.setattr(socket, "if_nametoindex", lambda _: 77)
    with pytest.raises(TransferError, match="lo is gone or was made anew"):
        here.add_peer("q@1", b"q@1", region)
    assert here._agent.calls == ["add"]
