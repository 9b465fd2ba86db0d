"""NIXL that is absent or cannot start is one clear sentence, not a foreign traceback; and one of its errors
keeps nothing else from being given back."""

import contextlib
import os
import socket
import sys
import types

import pytest

from tandem_engine.base.errors import TransferError, TransportUnavailableError
from tandem_engine.disaggregation.nixl import agent
from tandem_engine.disaggregation.nixl.agent import Interfaces, NixlAgent
from tandem_engine.disaggregation.nixl.layout import Descriptors, Region

REGION = Region(0, 64, 2, "DRAM", 0)


def test_missing_library_names_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(TransportUnavailableError, match="pip install nixl"):
        NixlAgent("w@1", Region(0, 64, 2, "DRAM", 0), Interfaces())


def test_memory_that_cannot_be_registered_is_reported():
    with pytest.raises(TransportUnavailableError, match="UCX backend on FILE"):
        NixlAgent("w@1", Region(0, 64, 2, "FILE", 0), Interfaces())


def test_missing_shared_memory_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(agent, "SHARED_MEMORY", tmp_path / "none")
    with pytest.raises(
        TransportUnavailableError, match=r"none cannot be written: mount a tmpfs there, or set UCX_TLS="
    ):
        NixlAgent("w@1", Region(0, 64, 2, "FILE", 0), Interfaces())


class RefusingNixl:
    """nixl_agent that others have connected to, and whose calls raise what `raises` has for them."""

    def __init__(self, name: str, config: object) -> None:
        self.net_devices = os.environ.get("UCX_NET_DEVICES")
        self.calls: list[str] = []
        self.raises: dict[str, Exception] = {}

    def register_memory(self, ranges: object, device: str) -> str:
        return "memory"

    def get_agent_metadata(self) -> bytes:
        return b"mine"

    def add_remote_agent(self, metadata: bytes) -> bytes:
        """The metadata is the name."""
        return self._called("add", metadata)

    def remove_remote_agent(self, name: str | bytes) -> None:
        self._called("remove", name)

    def get_xfer_descs(self, ranges: object, device: str) -> object:
        return ranges

    def initialize_xfer(self, *what: object) -> str:
        return "handle"

    def transfer(self, handle: str) -> str:
        return self._called("transfer", handle)

    def release_xfer_handle(self, handle: str) -> None:
        self._called("release", handle)

    def deregister_memory(self, registered: str) -> None:
        self._called("deregister", registered)

    def _called(self, call: str, given: object) -> object:
        self.calls.append(f"{call} {given}")
        if call in self.raises:
            raise self.raises[call]
        return given


@pytest.fixture
def refusing(monkeypatch) -> NixlAgent:
    """An agent over `RefusingNixl`, at the interface lo."""
    api = types.SimpleNamespace(nixl_agent=RefusingNixl, nixl_agent_config=lambda **_: None)
    monkeypatch.setitem(sys.modules, "nixl", types.SimpleNamespace(_api=api, _bindings=object()))
    monkeypatch.setitem(sys.modules, "nixl._api", api)
    monkeypatch.setitem(sys.modules, "nixl._bindings", object())
    monkeypatch.setattr(agent, "_error_types", lambda _: (RuntimeError,))
    return NixlAgent("w@1", REGION, Interfaces(frozenset({"lo"})))


def test_add_peer_checks_network_interfaces_first(refusing, monkeypatch):
    """The last one was a moment ago, and found nothing wrong."""
    refusing.add_peer("p@1", b"p@1")
    monkeypatch.setattr(socket, "if_nametoindex", lambda _: 77)
    with pytest.raises(TransferError, match="lo was removed or recreated"):
        refusing.add_peer("q@1", b"q@1")
    assert refusing._agent.calls == ["add b'p@1'"]


def test_agent_with_undecodable_name_is_removed(refusing):
    """Any process may have written it."""
    with pytest.raises(TransferError, match="belongs to agent"):
        refusing.add_peer("p@1", b"\xff\xfe")
    assert refusing._agent.calls == [r"add b'\xff\xfe'", r"remove b'\xff\xfe'"]


def test_failed_nixl_write_releases_its_handle(refusing):
    refusing._agent.raises = {"transfer": TypeError("nobody foresaw this")}
    with pytest.raises(TypeError, match="nobody foresaw this"):
        refusing.write("p@1", Descriptors((), ()), "DRAM")
    assert refusing._agent.calls[-1] == "release handle"


@pytest.mark.parametrize("error", [RuntimeError("NIXL's own"), TypeError("nobody's")], ids=["foreseen", "unforeseen"])
def test_agent_goes_though_its_memory_is_not_deregistered(refusing, error):
    refusing._agent.raises = {"deregister": error}
    with contextlib.suppress(TypeError):
        refusing.close()
    assert not hasattr(refusing, "_agent")


@pytest.mark.parametrize(("users", "seen"), [(None, "eth0,mlx5_0:1"), ("eth9", "eth9")], ids=["nobody", "the user"])
def test_ucx_devices_are_set_during_start_unless_user_set_them(refusing, monkeypatch, users, seen):
    if users is None:
        monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    else:
        monkeypatch.setenv("UCX_NET_DEVICES", users)
    started = NixlAgent("w@2", REGION, Interfaces(), variables={"UCX_NET_DEVICES": "eth0,mlx5_0:1"})
    assert started._agent.net_devices == seen
    assert os.environ.get("UCX_NET_DEVICES") == users
