"""A network interface that is taken away and made again: UCX does not survive it, the process does."""

import contextlib

import pytest

from tandem_testing.chaos.namespaces import Switch, why_not
from tandem_testing.disagg_placed import placed
from tandem_testing.waiting import wait_for

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"workers cannot have addresses of their own: {why_not()}")

PATIENCE_S = 60.0
ANSWERED = 150
"""Bytes with which the kernel has accepted a connection and taken the first words on it."""
LOOKS = 20


def test_connection_after_interface_recreation_keeps_process():
    with (
        contextlib.closing(Switch.open()) as switch,
        placed(switch.place(), ["friend", "stranger"]) as others,
        placed(place := switch.place(), ["victim"]) as victim,
    ):
        victim.greet("victim", others.hellos["friend"])
        others.greet("friend", victim.hellos["victim"])
        assert others.push("friend", "victim@1") == "done"
        assert victim.push("victim", "friend@1") == "done"
        place.unplug()
        place.plug()
        answered = place.carried()
        others.greet("stranger", victim.hellos["victim"])
        others.begin_push("stranger", "victim@1")
        wait_for(lambda: place.carried() - answered >= ANSWERED, PATIENCE_S)
        # Each is a turn of the thread that would let UCX read what the other process has sent.
        failed = {victim.push("victim", "friend@1") for _ in range(LOOKS)}
        assert failed <= {"network interface eth0 was removed or recreated", "not connected to friend@1"}
        assert victim.process.poll() is None
