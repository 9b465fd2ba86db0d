"""An address can be taken from a process that lives on, and given to another."""

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tandem_testing.chaos.namespaces import Namespace, Switch, why_not
from tandem_testing.waiting import wait_for

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"workers cannot have addresses of their own: {why_not()}")

PORT = 7000
PATIENCE_S = 60.0
SILENCE_S = 0.3
ANSWERER = f"""
import socket, sys
listener = socket.create_server((sys.argv[1], {PORT}))
print("listens", flush=True)
while True:
    line, _ = listener.accept()
    while word := line.recv(100):
        line.sendall(sys.argv[2].encode() + word)
    line.close()
"""
SUITE = """
import sys
from tandem_testing.chaos.namespaces import Switch
switch = Switch.open()
switch.place()
print(switch.home, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def switch():
    with contextlib.closing(Switch.open()) as opened:
        yield opened


@contextlib.contextmanager
def answering(place: Namespace, name: str):
    """A server at the place's address that answers everything with its name and the message."""
    argv = place.around([sys.executable, "-c", ANSWERER, place.address, name])
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "listens\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def connected(address: str):
    with socket.create_connection((address, PORT), timeout=PATIENCE_S) as line:
        yield line


def asked(line: socket.socket, word: bytes) -> bytes:
    line.sendall(word)
    return line.recv(100)


def test_unplugged_process_stays_alive_and_silent(switch):
    place = switch.place()
    with answering(place, "one") as process, connected(place.address) as line:
        assert asked(line, b"?") == b"one?"
        carried = place.carried()
        assert carried > 0
        place.unplug()
        line.sendall(b"?")
        line.settimeout(SILENCE_S)
        with pytest.raises(TimeoutError):
            line.recv(100)
        assert process.poll() is None
        assert place.carried() >= carried
        place.plug()
        line.settimeout(PATIENCE_S)
        assert line.recv(100) == b"one?"


def test_reassigned_address_resets_connections_of_first_owner(switch):
    first = switch.place()
    with answering(first, "old") as old, connected(first.address) as line:
        assert asked(line, b"?") == b"old?"
        first.unplug()
        second = switch.place(first.address)
        with answering(second, "new"), connected(second.address) as second_line:
            assert asked(second_line, b"?") == b"new?"
            # Data for the old one reaches no process.
            with pytest.raises(ConnectionResetError):
                asked(line, b"?")
        assert old.poll() is None


def test_namespace_has_own_interfaces_and_ucx_tcp_only(switch):
    look = switch.place().around(["sh", "-c", "ls /sys/class/net; echo $UCX_TLS"])
    *seen, tls = subprocess.run(look, capture_output=True, text=True, check=True).stdout.split()
    assert (sorted(seen), tls) == (sorted(["eth0", *interfaces_of_an_empty_namespace()]), "tcp")


def interfaces_of_an_empty_namespace() -> list[str]:
    """The loopback, and with some kernels ends of tunnels."""
    empty = ["unshare", "--net", "--mount", "sh", "-c", "mount -t sysfs tandem /sys && ls /sys/class/net"]
    return subprocess.run(empty, capture_output=True, text=True, check=True).stdout.split()


def test_two_switches_have_different_addresses(switch):
    with contextlib.closing(Switch.open()) as other:
        assert other.home != switch.home


def test_nothing_is_left_of_a_suite_that_was_killed():
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    suite = subprocess.Popen(
        [sys.executable, "-c", SUITE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    )
    try:
        assert suite.stdout is not None
        subnet = suite.stdout.readline().strip().rpartition(".")[0]
        interface = Path(f"/sys/class/net/tandem-c{subnet.rpartition('.')[2]}")
        assert interface.exists()
    finally:
        suite.kill()
        suite.communicate()
    # The kernel takes it, once the process that held the switch has died with its parent.
    wait_for(lambda: not interface.exists(), PATIENCE_S)
