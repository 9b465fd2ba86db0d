"""A network interface that was taken away is noticed, for good, and the process makes way once it is back."""

import queue
import socket

import pytest

from tandem_engine.disaggregation.digest import PageDigester
from tandem_engine.disaggregation.nixl import agent
from tandem_engine.disaggregation.nixl.agent import Interfaces, own_devices, ucx_memory, ucx_network, watched
from tandem_engine.disaggregation.nixl.layout import Region
from tandem_engine.disaggregation.nixl.queues import Outbox, Stop
from tandem_engine.disaggregation.nixl.thread import LEAVE_AFTER, TransferThread
from tandem_testing.digest_pools import digest_pool
from tandem_testing.scheduler_builders import ManualClock

NET1 = "fd000000000000000000000000000007 05 40 00 80     net1\n"


@pytest.fixture
def machine(monkeypatch) -> dict[str, int]:
    """Its interfaces, by name; to be changed."""
    there = {"lo": 1, "eth0": 2, "mlx5_0": 3}

    def index(name: str) -> int:
        if name not in there:
            raise OSError(19, "no such device")
        return there[name]

    monkeypatch.setattr(socket, "if_nametoindex", index)
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(number, name) for name, number in there.items()])
    return there


def test_interface_of_this_engine_is_watched():
    assert watched("tcp://127.0.0.1:5601", "all") == {"lo"}


def test_interface_with_an_ipv6_address_is_found(machine, monkeypatch, tmp_path):
    machine["net1"] = 5
    table = tmp_path / "if_inet6"
    table.write_text(NET1)
    monkeypatch.setattr(agent, "IPV6_ADDRESSES", table)
    assert watched("tcp://[fd00::7]:5601", "all") == {"net1"}
    assert watched("tcp://[fd00::8]:5601", "all") == frozenset()


@pytest.mark.parametrize(
    ("net_devices", "names"),
    [
        ("all", set()),
        ("eth0", {"eth0"}),
        ("mlx5_0:1, eth0", {"mlx5_0", "eth0"}),
        ("absent", set()),
        ("^eth0", set()),
    ],
)
def test_interfaces_of_ucx_net_devices_are_watched(machine, net_devices, names):
    assert watched("tcp://worker.example:5601", net_devices) == names


@pytest.fixture
def addresses(monkeypatch) -> dict[str, str]:
    """IPv4 addresses of this machine's interfaces."""
    found = {"lo": "127.0.0.1", "eth0": "10.0.0.7", "cali7": "10.0.0.8"}
    monkeypatch.setattr(agent, "_ipv4", lambda _, name: socket.inet_aton(found.get(name, "0.0.0.0")))
    monkeypatch.setattr(socket, "if_nameindex", lambda: [*enumerate(found, start=1)])
    return found


@pytest.mark.parametrize(
    ("endpoint", "devices"),
    [
        ("tcp://10.0.0.7:5601", "eth0,mlx5_0:1,mlx5_1:1"),
        ("tcp://127.0.0.1:5601", "lo,mlx5_0:1,mlx5_1:1"),
        ("tcp://10.0.0.9:5601", "all"),
        ("tcp://worker.example:5601", "all"),
    ],
    ids=["a pod's", "of one machine", "another node's", "a name"],
)
def test_ucx_devices_are_rdma_and_interface_of_the_endpoint(addresses, tmp_path, endpoint, devices):
    assert own_devices(endpoint, ("mlx5_0:1", "mlx5_1:1"), tmp_path) == devices


@pytest.mark.parametrize(
    ("endpoint", "first"),
    [("tcp://10.0.0.7:5601", None), ("tcp://worker.example:5601", None), ("tcp://[fd00::7]:5601", "inet6,inet")],
)
def test_ucx_prefers_the_family_of_this_engines_address(endpoint, first):
    network = ucx_network(endpoint, "eth0")
    assert network["UCX_NET_DEVICES"] == "eth0"
    assert network.get("UCX_TCP_AF_PRIO") == first


def test_ucx_watches_memory_only_where_it_registers_memory(tmp_path):
    """To watch it takes 0.4 s of each start."""
    absent, there = tmp_path / "infiniband", tmp_path
    assert ucx_memory("DRAM", (absent,)) == {"UCX_MEM_EVENTS": "n"}
    assert ucx_memory("DRAM", (absent, there)) == ucx_memory("VRAM", (absent,)) == {}


def test_link_local_address_names_its_interface_by_zone(machine):
    assert watched("tcp://[fe80::1%eth0]:5601", "all") == {"eth0"}


def test_ucx_leaves_bridges_out_so_it_may_choose(addresses, tmp_path):
    (tmp_path / "eth0" / "bridge").mkdir(parents=True)
    assert own_devices("tcp://10.0.0.7:5601", (), tmp_path) == "all"


def test_interfaces_allowed_by_ucx_are_watched(addresses):
    assert watched("tcp://10.0.0.7:5601", own_devices("tcp://10.0.0.7:5601", ("mlx5_0:1",))) == {"eth0"}


@pytest.mark.parametrize("now", [0, 7])
def test_removed_or_recreated_interface_stays_lost(machine, now):
    seen = Interfaces(frozenset({"lo", "eth0"}))
    assert seen.same()
    del machine["eth0"]
    if now:
        machine["eth0"] = now
    assert not seen.same()
    assert "eth0 was removed or recreated" in seen.lost
    assert seen.back == bool(now)
    machine["eth0"] = 2
    assert not seen.same()


def test_interfaces_that_nixl_does_not_use_may_change(machine):
    seen = Interfaces(frozenset({"eth0"}))
    machine["cali7"] = 9
    del machine["mlx5_0"]
    assert seen.same()
    assert not seen.back


class IdleAgent:
    def attend(self) -> None:
        """Nothing happens."""

    def close(self) -> None:
        """Nothing is open."""


class Course:
    """An inbox: at each wait of the thread the next of some things happens, in the end `Stop`."""

    def __init__(self, clock: ManualClock, *happens: object) -> None:
        self.clock, self.happens = clock, [*happens]

    def get(self, timeout: float) -> object:
        if not self.happens:
            return Stop()
        step = self.happens.pop(0)
        if callable(step):
            step()
        else:
            self.clock.time += step
        raise queue.Empty


def asked_to_leave(seen: Interfaces, *happens: object) -> list[str]:
    clock, asked = ManualClock(), []
    pool, outbox = digest_pool(), Outbox()
    TransferThread(
        agent=IdleAgent(),
        digester=PageDigester(pool),
        region=Region(pool.address, pool.page_bytes, pool.num_pages, "DRAM", 0),
        clock=clock,
        inbox=Course(clock, *happens),
        outbox=outbox,
        interfaces=seen,
        leave=asked.append,
    ).run()
    outbox.close()
    return asked


def test_drain_is_requested_after_interface_is_recreated(machine):
    seen = Interfaces(frozenset({"eth0"}))

    def gone() -> None:
        del machine["eth0"]
        assert not seen.same()

    def back() -> None:
        machine["eth0"] = 8

    assert asked_to_leave(seen, 100.0, gone, 100.0, 100.0) == []
    # A fenced one has ended by then.
    assert asked_to_leave(seen, back, LEAVE_AFTER - 0.1) == []
    reason, *again = asked_to_leave(seen, 1.0, LEAVE_AFTER + 0.1)
    assert "eth0" in reason
    assert {*again} <= {reason}


def test_drain_is_not_requested_while_interfaces_are_unchanged(machine):
    assert asked_to_leave(Interfaces(frozenset({"eth0"})), 100.0, 100.0) == []
