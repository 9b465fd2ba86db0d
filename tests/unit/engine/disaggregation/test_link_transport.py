"""What a process reports about the transport to another one."""

import pytest

from tandem_engine.base.names import LinkTransport
from tandem_engine.disaggregation.transport import (
    SPEED,
    condition_of,
    machine_name,
    rdma_is_up,
    rdma_ports,
    transport_between,
    usable_transports,
)
from tandem_engine.messages.transfer import Hello
from tandem_testing.disagg_network import make_peer

TCP, RDMA, SHM, CUDA_IPC = SPEED


def hello(machine: str, *transports: LinkTransport, device: str = "DRAM") -> Hello:
    return Hello(
        sender=make_peer("w"),
        nixl_metadata=b"",
        pool_address=0,
        page_bytes=1,
        num_pages=1,
        heads=1,
        device=device,
        device_id=0,
        machine=machine,
        transports=transports,
    )


@pytest.mark.parametrize(
    ("ucx_tls", "device", "rdma", "usable"),
    [
        ("all", "DRAM", False, (TCP, SHM)),
        ("all", "VRAM", True, (TCP, RDMA, SHM, CUDA_IPC)),
        ("tcp", "DRAM", True, (TCP,)),
        ("tcp,self", "VRAM", True, (TCP,)),
        ("rc,cuda", "VRAM", True, (RDMA, CUDA_IPC)),
        ("rc_mlx5", "DRAM", False, ()),
        ("sm", "DRAM", True, (SHM,)),
        ("^tcp", "DRAM", False, (SHM,)),
        ("^posix", "DRAM", False, (TCP,)),
    ],
)
def test_usable_transports_follow_ucx_tls_and_devices(ucx_tls, device, rdma, usable):
    assert usable_transports(ucx_tls, device=device, rdma=rdma) == usable


@pytest.mark.parametrize(
    ("here", "there", "expected"),
    [
        (hello("a", TCP, SHM), hello("a", TCP, SHM), SHM),
        (hello("a", TCP, SHM), hello("b", TCP, SHM), TCP),
        (hello("a", TCP, RDMA, SHM), hello("b", TCP, RDMA, SHM), RDMA),
        (hello("a", TCP, RDMA), hello("b", TCP), TCP),
        (hello("a", TCP, SHM), hello("a", TCP), TCP),
        (hello("a", *SPEED, device="VRAM"), hello("a", *SPEED, device="VRAM"), CUDA_IPC),
        (hello("a", *SPEED, device="VRAM"), hello("b", *SPEED, device="VRAM"), RDMA),
        (hello("", *SPEED), hello("", *SPEED), LinkTransport.UNKNOWN),
        (hello("a", SHM), hello("b", SHM), LinkTransport.UNKNOWN),
        (hello("a"), hello("b"), LinkTransport.UNKNOWN),
    ],
)
def test_best_that_both_can_use_is_named_and_nothing_is_guessed(here, there, expected):
    assert transport_between(here, there) is expected


@pytest.mark.parametrize(
    ("got", "expected", "condition"),
    [
        (TCP, RDMA, "expected rdma, got tcp"),
        (TCP, CUDA_IPC, "expected cuda_ipc, got tcp"),
        (RDMA, CUDA_IPC, "expected cuda_ipc, got rdma"),
        (RDMA, RDMA, ""),
        (SHM, RDMA, ""),
        (TCP, None, ""),
        (LinkTransport.UNKNOWN, RDMA, ""),
    ],
)
def test_only_transport_slower_than_expected_sets_condition(got, expected, condition):
    assert condition_of(got, expected) == condition


def test_rdma_port_counts_when_it_is_active(tmp_path):
    assert not rdma_is_up(tmp_path)
    state = tmp_path / "mlx5_0" / "ports" / "1" / "state"
    state.parent.mkdir(parents=True)
    state.write_text("1: DOWN\n")
    assert not rdma_is_up(tmp_path)
    state.write_text("4: ACTIVE\n")
    assert rdma_is_up(tmp_path)


def test_machine_name_is_stable_within_a_process():
    assert machine_name() == machine_name() != ""


def test_rdma_ports_are_named_as_ucx_does(tmp_path):
    assert rdma_ports(tmp_path / "absent") == ()
    for port in ("mlx5_1/ports/1", "mlx5_0/ports/2", "mlx5_0/ports/1"):
        (tmp_path / port).mkdir(parents=True)
    assert rdma_ports(tmp_path) == ("mlx5_0:1", "mlx5_0:2", "mlx5_1:1")
