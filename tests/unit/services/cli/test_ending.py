"""Signals that end `tandem up`, and those that were ignored when it started."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from tandem_services.cli.processes import Child, Ending, Supervisor, how_to_end
from tandem_services.common.tasks import ending_signals
from tandem_testing.waiting import wait_for

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def _default_signals():
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Probe(Supervisor):
    """While it stops, signals arrive; it notes after each whether it should hurry."""

    def __init__(self, *numbers: signal.Signals) -> None:
        super().__init__()
        self.numbers, self.hurried, self.grace = numbers, [], None

    def stop(self, grace: float, *, hurried: Callable[[], bool] = lambda: False) -> None:
        self.grace = grace
        for number in self.numbers:
            os.kill(os.getpid(), number)
            self.hurried.append(hurried())


@pytest.mark.parametrize("first", SIGNALS)
def test_first_signal_interrupts_and_the_second_hurries(first):
    ending, probe = Ending(), Probe(signal.SIGHUP, signal.SIGHUP, signal.SIGTERM)
    ending.watch_signals()
    with pytest.raises(KeyboardInterrupt) as raised:
        os.kill(os.getpid(), first)
    assert raised.value.args == (first,)
    ending.stop(probe, 7.0, notify=lambda: None)
    assert (probe.grace, probe.hurried) == (7.0, [False, False, True])


def test_signal_while_a_failed_start_is_stopped_hurries():
    ending, probe = Ending(), Probe(signal.SIGINT)
    ending.watch_signals()
    ending.stop(probe, 5.0, notify=lambda: None)
    assert probe.hurried == [True]


@pytest.mark.parametrize("ignored", [signal.SIGINT, signal.SIGHUP])
def test_signal_that_was_ignored_at_the_start_stays_ignored(ignored):
    signal.signal(ignored, signal.SIG_IGN)
    assert {*ending_signals()} == {*SIGNALS} - {ignored}
    ending = Ending()
    ending.watch_signals()
    os.kill(os.getpid(), ignored)
    assert signal.getsignal(ignored) is signal.SIG_IGN
    assert how_to_end() == (f"kill {os.getpid()}" if ignored is signal.SIGINT else "Ctrl-C")


REPORT = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, flush=True)"


def test_child_takes_the_sigint_that_its_supervisor_ignores(tmp_path):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = Child(name="c", argv=[sys.executable, "-c", REPORT], log=tmp_path / "c.log")
    child.start()
    child.process.wait(timeout=60)
    wait_for(lambda: child.pump.settled, 60.0)
    assert child.log.read_text().split()[-1] == "True"


STUBBORN = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1], "w").close()
time.sleep(600)
"""

RUN = """
import sys, time
from pathlib import Path
from tandem_services.cli.processes import Ending
from tandem_services.cli.processes import Child, Supervisor

folder = Path(sys.argv[1])
supervisor, ending = Supervisor(), Ending()
ending.watch_signals()
try:
    argv = [sys.executable, "-c", sys.argv[2], str(folder / "up")]
    supervisor.start(Child(name="c", argv=argv, log=folder / "c.log"))
    while not (folder / "up").exists():
        time.sleep(0.01)
    print("up", flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    print("stopping", flush=True)
finally:
    ending.stop(supervisor, 600.0, notify=lambda: None)
"""


def test_second_signal_ends_a_child_that_would_take_its_grace(tmp_path):
    command = [sys.executable, "-c", RUN, str(tmp_path), STUBBORN]
    env = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        for line in ("up\n", "stopping\n"):
            assert process.stdout.readline() == line
            process.send_signal(signal.SIGTERM)
        # Long before the grace of 600 s, or this test runs into its limit.
        assert process.wait(timeout=120) == 0
    assert "KeyboardInterrupt" in (tmp_path / "c.log").read_text()
