"""Places of processes, and their shares of limits when Redis does not answer."""

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from tandem_engine.base.errors import ConfigError
from tandem_services.gateway.access.tenants import AccessMetrics, Tenant, TenantLimits
from tandem_services.gateway.process_place import MAX_PROCESSES, PlaceFile, ProcessPlace, read_place, write_place
from tandem_services.router.usage_counters import Ask, Refused
from tandem_testing.service_clock import ServiceClock


def place(number: int, count: int) -> ProcessPlace:
    return ProcessPlace(Path("/nowhere"), number, count, 3, "secret")


@given(total=st.integers(0, 10_000), count=st.integers(1, MAX_PROCESSES))
def test_shares_of_all_processes_add_up(total, count):
    assert sum(place(number, count).share_of(total) for number in range(count)) == total


@given(limit=st.integers(1, 20), count=st.integers(1, MAX_PROCESSES), kind=st.sampled_from(["requests", "tokens"]))
def test_processes_grant_exactly_one_limit_without_redis(limit, count, kind):
    fields = {"requests_per_minute": limit} if kind == "requests" else {"tokens_per_minute": limit}
    tenant = Tenant(name="small", sha256=("0" * 64,), **fields)

    async def granted(number: int) -> int:
        limits = TenantLimits(
            clock=ServiceClock(), metrics=AccessMetrics(CollectorRegistry()), place=place(number, count)
        )
        taken = [await limits.take(tenant, Ask(**{kind: 1})) for _ in range(limit + 1)]
        refused = [each.usage for each in taken if each.usage.refused is not Refused.NOTHING]
        assert all(usage.retry_s is not None for usage in refused)
        return len(taken) - len(refused)

    assert sum(asyncio.run(granted(number)) for number in range(count)) == limit


async def test_concurrency_without_a_share_is_refused():
    tenant = Tenant(name="small", sha256=("0" * 64,), concurrency=1)
    limits = TenantLimits(clock=ServiceClock(), metrics=AccessMetrics(CollectorRegistry()), place=place(1, 2))
    assert (await limits.take(tenant, Ask(lease="a"))).usage.refused is Refused.CONCURRENCY


def test_place_is_read_as_it_was_written(tmp_path):
    path = write_place(tmp_path, PlaceFile(number=1, count=2, listener=7, token="secret"))
    read = read_place(path)
    assert read == ProcessPlace(tmp_path, 1, 2, 7, "secret")
    assert "secret" not in repr(read)


def test_malformed_process_place_file_is_refused_by_its_path(tmp_path):
    (tmp_path / "0.json").write_text('{"number": 0}')
    with pytest.raises(ConfigError, match=r"--process-place .*0\.json"):
        read_place(tmp_path / "0.json")
