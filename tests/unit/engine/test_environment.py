"""Environment variables that are set for a library are for it alone, also where a process has several engines."""

import os
import threading
from collections.abc import Callable
from types import TracebackType

import pytest

from tandem_engine.base import environment
from tandem_engine.base.environment import defaults_while, read_environment

NAME = "UCX_NET_DEVICES"
PATIENCE_S = 60.0


class Door:
    """A lock that reports when a thread finds it held."""

    def __init__(self) -> None:
        self.held = threading.Lock()
        self.knocked = threading.Event()

    def __enter__(self) -> None:
        if not self.held.acquire(blocking=False):
            self.knocked.set()
            self.held.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.held.release()


@pytest.fixture
def door(monkeypatch) -> Door:
    monkeypatch.delenv(NAME, raising=False)
    made = Door()
    monkeypatch.setattr(environment, "_lock", made)
    return made


def seen_by_its_own_default() -> str:
    with defaults_while({NAME: "eth1"}):
        return os.environ[NAME]


@pytest.mark.parametrize(
    ("look", "seen"),
    [(seen_by_its_own_default, "eth1"), (lambda: read_environment().ucx_net_devices, "")],
    ids=["lends", "reads"],
)
def test_default_set_by_one_thread_is_not_visible_to_another(door, look: Callable[[], str], seen: str) -> None:
    """An engine of the same process took it for its user's, and then its library read nothing, for it was gone."""
    found: list[str] = []
    other = threading.Thread(target=lambda: found.append(look()), daemon=True)
    with defaults_while({NAME: "eth0"}):
        other.start()
        assert door.knocked.wait(PATIENCE_S)
        assert os.environ[NAME] == "eth0"
    other.join(PATIENCE_S)
    assert found == [seen]
    assert NAME not in os.environ
