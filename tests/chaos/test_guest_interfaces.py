"""A network interface beside the one with a worker's address: it was there when the worker started, and goes.

UCX uses all that it finds, unless told, and takes one that is there for a moment as soon as any other.
"""

import contextlib

import pytest

from tandem_testing.chaos.namespaces import Switch, why_not
from tandem_testing.disagg_placed import placed

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"workers cannot have addresses of their own: {why_not()}")

GUEST = "198.19.7.1"


def test_worker_is_reachable_after_unused_interface_is_removed():
    with contextlib.closing(Switch.open()) as switch:
        place = switch.place()
        place.route_all()
        with placed(place, ["sender"]) as here, contextlib.ExitStack() as while_it_is_there:
            while_it_is_there.enter_context(place.guest("guest", GUEST))
            with placed(place, ["receiver"]) as there:
                while_it_is_there.close()
                here.greet("sender", there.hellos["receiver"])
                assert here.push("sender", "receiver@1") == "done"
