import pytest

from tandem_services.cli import machine_shares
from tandem_services.cli.machine_shares import SERVICES_BYTES, share_of_worker

GIB = 1 << 30


@pytest.fixture
def checkpoint(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(bytes(1 << 20))
    return tmp_path


@pytest.mark.parametrize(("limit", "workers"), [(None, 8), (4 * GIB, 2), (2 * GIB, 1)])
def test_containers_with_room_leave_pools_at_their_default(monkeypatch, checkpoint, limit, workers):
    monkeypatch.setattr(machine_shares, "memory_limit", lambda: limit)
    assert share_of_worker(checkpoint, workers) is None


@pytest.mark.parametrize(("gib", "workers"), [(0.7, 1), (1.6, 2), (2, 4)])
def test_workers_and_services_share_a_small_container(monkeypatch, checkpoint, gib, workers):
    limit = int(gib * GIB)
    monkeypatch.setattr(machine_shares, "memory_limit", lambda: limit)
    share = share_of_worker(checkpoint, workers)
    assert share is not None
    of_workers = workers * share * limit
    assert 0.9 * (limit - SERVICES_BYTES) < of_workers < limit - SERVICES_BYTES


def test_large_weights_count(monkeypatch, checkpoint):
    monkeypatch.setattr(machine_shares, "memory_limit", lambda: 3 * GIB)
    monkeypatch.setattr(machine_shares, "_weights", lambda _: 2 * GIB)
    assert share_of_worker(checkpoint, 1) is not None


def test_worker_memory_share_is_positive_in_small_container(monkeypatch, checkpoint):
    monkeypatch.setattr(machine_shares, "memory_limit", lambda: SERVICES_BYTES // 2)
    assert share_of_worker(checkpoint, 1) == 0.01
