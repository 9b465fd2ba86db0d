"""Workers with network namespaces, and so addresses, of their own: one can be taken away while its process lives on.

    this machine ── veth ── switch (a namespace with a bridge) ─┬─ veth ── eth0 of a worker
    gateways, Redis                                             └─ veth ── eth0 of another …

    open      the switch and this machine's port of it; addresses are of 198.18.0.0/15, which RFC 2544 keeps for tests
    place     a namespace with the next address, or with one that another has or had
    unplug    the veth is deleted, as when a pod's network goes: no host answers, nothing is closed, nothing is refused
    plug      a new veth with the same address; its hardware address follows from that, so neighbours need not learn

No namespace has a name. Each lives as long as the process that was started to hold it, which dies with this one, and
the kernel takes veths and bridge along with the namespaces that they are in: nothing is left, however the suite ends.

Shared memory knows no network namespace. So UCX is set to TCP alone, and ports count the bytes that prove it.

Needs root, iproute2, and a kernel with veth, bridges and token buckets.
"""

import contextlib
import functools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

from tandem_engine.base.linux import die_with_parent

TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
OF_ITS_OWN = 'mount -t sysfs tandem /sys && exec "$0" "$@"'
"""UCX finds its interfaces in /sys, which shows those of the namespace that it was mounted in."""
TRIAL = """
mount -t sysfs tandem /sys && ip link add b0 type bridge && ip link add v0 type veth peer name v1 &&
tc qdisc add dev v0 root tbf rate 8mbit burst 16kb latency 1s
"""
SUBNETS = 256
HOME = 254
"""This machine's number at the switch."""


def _run(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(argv)}: {done.stderr.strip()[:300]}")
    return done.stdout


@dataclass(kw_only=True, slots=True)
class _Holder:
    """A process that keeps a network namespace alive, and is all that does."""

    process: "subprocess.Popen[str]"

    @classmethod
    def start(cls) -> Self:
        process = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "ip link set lo up && echo held && exec sleep infinity"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509  only prctl runs between fork and exec
        )
        assert process.stdout is not None
        if process.stdout.readline() != "held\n":
            process.kill()
            process.wait()
            raise OSError("no network namespace could be made")
        return cls(process=process)

    @property
    def pid(self) -> str:
        return str(self.process.pid)

    def run(self, script: str) -> str:
        """A shell script inside. Raises `OSError`."""
        return _run(*self.enter(), "sh", "-ec", script)

    def enter(self) -> list[str]:
        return ["nsenter", f"--net=/proc/{self.pid}/ns/net"]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@dataclass(kw_only=True, slots=True)
class Namespace:
    """Where one worker lives. Made by `Switch.place`."""

    address: str
    _port: str
    """Its veth's other end, at the switch."""
    _holder: _Holder
    _switch: _Holder
    _plugged: bool = False
    _carried: int = 0
    """Bytes of ports that are gone."""

    def plug(self) -> None:
        """Idempotent."""
        if self._plugged:
            return
        _run(
            *("ip", "link", "add", "eth0", "address", hardware_address(self.address), "netns", self._holder.pid),
            *("type", "veth", "peer", "name", self._port, "netns", self._switch.pid),
        )
        self._switch.run(f"ip link set {self._port} master bridge up")
        self._holder.run(f"ip address add {self.address}/24 dev eth0\nip link set eth0 up")
        self._plugged = True

    def unplug(self) -> None:
        """Idempotent."""
        if self._plugged:
            self._carried = self.carried()
            self._switch.run(f"ip link delete {self._port}")
            self._plugged = False

    def route_all(self) -> None:
        """Every address is worth a try by eth0, as by a pod's."""
        self._holder.run("ip route add default dev eth0")

    @contextlib.contextmanager
    def guest(self, name: str, address: str) -> Iterator[None]:
        """One more interface, for as long as it is wanted."""
        self._holder.run(
            f"ip link add {name} type veth peer name {name}-end\nip address add {address}/24 dev {name}\n"
            f"ip link set {name} up\nip link set {name}-end up"
        )
        try:
            yield
        finally:
            self._holder.run(f"ip link delete {name}")

    def slow_down(self, bits_per_s: int) -> None:
        """What it sends from now on leaves no faster, until it is unplugged."""
        self._holder.run(f"tc qdisc replace dev eth0 root tbf rate {bits_per_s} burst 16kb latency 60s")

    def carried(self) -> int:
        """Bytes it has sent so far."""
        if not self._plugged:
            return self._carried
        (port,) = json.loads(self._switch.run(f"ip -statistics -json link show dev {self._port}"))
        return self._carried + int(port["stats64"]["rx"]["bytes"])

    def around(self, argv: Sequence[str]) -> list[str]:
        """`argv`, run inside with KV over TCP. The process keeps its pid."""
        own = ["unshare", "--mount", "sh", "-c", OF_ITS_OWN]
        return ["env", "UCX_TLS=tcp", *self._holder.enter(), *own, *argv]

    def end(self) -> None:
        """It goes once the processes in it have gone, too. Its address is free at once."""
        self.unplug()
        self._holder.end()


@dataclass(kw_only=True, slots=True)
class Switch:
    """Connects namespaces with each other and with this machine. What is not closed dies with this process."""

    subnet: str
    _holder: _Holder
    _placed: list[Namespace] = field(default_factory=list)

    @classmethod
    def open(cls) -> Self:
        """From the main thread. Raises `OSError` where `why_not` has a reason."""
        holder = _Holder.start()
        try:
            # Another suite may have taken a subnet, or take one at the same time: its interface has the number of it.
            number = next(number for number in range(SUBNETS) if _take(number, holder))
            subnet, home = f"198.18.{number}", _interface(number)
            _run("ip", "address", "add", f"{subnet}.{HOME}/24", "dev", home)
            _run("ip", "link", "set", home, "up")
            holder.run("ip link add bridge type bridge\nip link set bridge up\nip link set home master bridge up")
        except BaseException:
            holder.end()
            raise
        return cls(subnet=subnet, _holder=holder)

    @property
    def home(self) -> str:
        """This machine's address at the switch."""
        return f"{self.subnet}.{HOME}"

    def place(self, address: str = "") -> Namespace:
        """A namespace, plugged in. With an `address` of another one, which must have been unplugged for good."""
        count = len(self._placed) + 1
        place = Namespace(
            address=address or f"{self.subnet}.{count}",
            _port=f"port{count}",
            _holder=_Holder.start(),
            _switch=self._holder,
        )
        self._placed.append(place)
        place.plug()
        return place

    def close(self) -> None:
        """Idempotent. Namespaces go when the processes in them have."""
        while self._placed:
            self._placed.pop().end()
        if self._holder.process.poll() is None:
            self._holder.end()


def hardware_address(address: str) -> str:
    """A locally administered one for an IPv4 address."""
    return ":".join(["02", "00", *(f"{int(part):02x}" for part in address.split("."))])


def _interface(number: int) -> str:
    return f"tandem-c{number}"


def _take(number: int, switch: _Holder) -> bool:
    """Whether this machine has a port of subnet `number` now that no process had before."""
    if re.search(rf"\b198\.18\.{number}\.", _run("ip", "-4", "address", "show")):
        return False
    try:
        _run(
            *("ip", "link", "add", _interface(number)),
            *("type", "veth", "peer", "name", "home", "netns", switch.pid),
        )
    except OSError as error:
        if "File exists" in str(error):
            return False
        raise
    return True


@functools.cache
def why_not() -> str:
    """Why this machine cannot give workers namespaces of their own; "" when it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool, package in TOOLS.items():
        if shutil.which(tool) is None:
            return f"{tool} ({package}) is not installed"
    # Within namespaces that end with the trial.
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "sh", "-ec", TRIAL], capture_output=True, text=True, check=False
    )
    return f"no network namespaces here: {tried.stderr.strip()[:200]}" if tried.returncode else ""
