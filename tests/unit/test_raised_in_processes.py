"""Exceptions armed through files, in functions of another process."""

import subprocess
import sys

import pytest

from tandem_testing.raised_in_processes import RemoteFaults
from tandem_testing.waiting import wait_for

TURNS = """
import sys, threading, time
from pathlib import Path
from tandem_testing.raised_anywhere import Planted
from tandem_testing.raised_in_processes import install
install(Path(sys.argv[1]))
from tandem_engine.base.addresses import Address

def turn():
    while True:
        garbage = [[] for _ in range(2000)]
        try:
            Address.parse("[::1]:1")
        except Planted:
            pass
        time.sleep(0.01)

threading.Thread(target=turn, daemon=True).start()
turn()
"""
PATIENCE_S = 30.0


@pytest.fixture
def faults(tmp_path):
    with subprocess.Popen([sys.executable, "-c", TURNS, str(tmp_path)]) as process:
        yield RemoteFaults(tmp_path)
        process.kill()


def test_armed_function_raises_once_for_each_order(faults):
    with faults.learning():
        wait_for(lambda: any("Address.parse" in name for name in faults.names()), PATIENCE_S)
    (name,) = [name for name in faults.names() if "Address.parse" in name]
    for times in (1, 2, 3):  # also in threads that have raised before
        faults.arm(name)
        wait_for(lambda times=times: faults.fallen() == [name] * times, PATIENCE_S, faults.fallen().__repr__)
    faults.arm("base/addresses.py:no such function:1")
    faults.disarm()
    assert faults.fallen() == [name] * 3
