"""Knobs stand around the parts that engines use today: what is put elsewhere commits no fault."""

from inspect import signature
from types import SimpleNamespace

import pytest

from tandem_engine.disaggregation.nixl import transport as nixl_transport
from tandem_engine.engine import EnginePort, peer_setup
from tandem_engine.engine.peer_setup import PeerSide
from tandem_engine.executor.runner import ModelRunner
from tandem_engine.ipc.channels import IpcContext
from tandem_testing.chaos.engine_main import FaultyPeers, FaultyTransport, install, put_in_place_of
from tandem_testing.chaos.knobs import KnobReader


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """Until the test ends."""
    for owner, name in ((nixl_transport, "NixlTransport"), (peer_setup, "PeerChannels"), (ModelRunner, "forward")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    install(KnobReader(path=tmp_path / "w.knobs"))


@pytest.mark.usefixtures("installed")
def test_engine_with_knobs_has_faulty_parts(monkeypatch):
    side, context = PeerSide(), IpcContext()
    side.open_port(EnginePort(worker_id="w", incarnation="w@1", context=context), SimpleNamespace(compat_hash="hash"))
    assert isinstance(side.socket, FaultyPeers)
    side.close()
    context.close()
    built, parameters = [], signature(FaultyTransport.__init__)

    def make(self, **given) -> None:
        parameters.bind(self, **given)  # raises for an argument that the faulty part does not take
        built.append(self)

    monkeypatch.setattr(FaultyTransport, "__init__", make)
    monkeypatch.setattr(peer_setup.RankedTransport, "build", lambda *, local, **_: local)
    parts = SimpleNamespace(agreement=None, pool=None, pools=SimpleNamespace(states=None))
    place, parallel = SimpleNamespace(agent=str), SimpleNamespace(departure=SimpleNamespace(ask=print))
    assert [peer_setup._nixl(parts, side.socket.me, place, parallel)] == built


def test_knob_of_missing_part_is_an_error():
    with pytest.raises(AttributeError):
        put_in_place_of(peer_setup, "TheNameBefore", object())
