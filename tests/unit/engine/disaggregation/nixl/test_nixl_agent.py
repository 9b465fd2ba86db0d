"""NIXL that is absent or cannot start is one clear sentence, not a traceback of somebody else's."""

import sys

import pytest

from tandem_engine.disaggregation.nixl.agent import NixlAgent
from tandem_engine.disaggregation.nixl.interfaces import Interfaces
from tandem_engine.disaggregation.nixl.layout import Region
from tandem_engine.errors import TransportUnavailableError


def test_a_missing_library_names_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(TransportUnavailableError, match="pip install nixl"):
        NixlAgent("w@1", Region(0, 64, 2, "DRAM", 0), Interfaces())


def test_memory_that_cannot_be_registered_is_reported():
    with pytest.raises(TransportUnavailableError, match="UCX backend on FILE"):
        NixlAgent("w@1", Region(0, 64, 2, "FILE", 0), Interfaces())
