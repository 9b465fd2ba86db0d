"""A Redis for each module, and systems that the whole session shares: starting one costs seconds of every core."""

from collections.abc import Iterator

import pytest

from tandem_testing.adapters import FLEET_ADAPTERS, write_fleet_adapter
from tandem_testing.otlp_receiver import OtlpReceiver, otlp_receiver
from tandem_testing.redis_server import REDIS_SERVER, RedisServer
from tandem_testing.router_builders import PATIENT_S
from tandem_testing.system import System
from tandem_testing.system_client import Reference, SystemClient

ENGINE_FLAGS = (
    *("--threads", "1"),
    *("--kv-cache-gib", "0.1"),
    *("--dtype", "float32"),
    # A long prompt takes several steps, so that there is a middle to interrupt.
    *("--chunked-prefill-size", "256"),
)
SHORT_REST = "64"
"""Tokens up to which the fleet's decode workers may compute themselves; whatever is longer has two workers, at any
rates of the moment."""
SYSTEMS: pytest.StashKey[list[System]] = pytest.StashKey()


@pytest.fixture(autouse=True)
def _connections_open_however_late_the_event_loop_looks(monkeypatch) -> None:
    """Theirs is a second, a Sentinel's a quarter. Then one command of a product that works without Redis fails."""
    monkeypatch.setattr("tandem_services.common.redis_line.OPEN_S", PATIENT_S)
    monkeypatch.setattr("tandem_services.common.redis_places.SENTINEL_S", PATIENT_S)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """Its data are whatever the module's tests have left: begin with FLUSHALL."""
    if REDIS_SERVER is None:
        pytest.skip("redis-server is not installed")
    process = RedisServer.start()
    yield process
    process.stop()


@pytest.fixture(scope="session")
def collector() -> Iterator[OtlpReceiver]:
    """Where the fleet sends its traces."""
    with otlp_receiver() as receiver:
        yield receiver


@pytest.fixture(scope="session")
def systems(request, tmp_path_factory, collector) -> Iterator[tuple[System, System]]:
    """Two prefill and two decode workers with adapters, and one worker that does both. That one starts first: it
    compiles the kernels of a new checkout, which the others would each compile if they started at the same time."""
    if REDIS_SERVER is None:
        pytest.skip("redis-server is not installed")
    folder = tmp_path_factory.mktemp("systems")
    modules = [f"{name}={write_fleet_adapter(folder, name)}" for name in FLEET_ADAPTERS]
    both = System.start(folder / "both", "--prefill", "0", "--decode", "0", "--both", "1", *ENGINE_FLAGS)
    request.config.stash[SYSTEMS] = started = [both]
    try:
        fleet = System.start(
            folder / "fleet",
            *("--prefill", "2", "--decode", "2", "--local-prefill-tokens", SHORT_REST),
            *("--lora-modules", *modules, "--lora-dir", str(folder), "--allow-runtime-lora-updating"),
            *("--log-format", "json"),
            # Only what a test sends as part of a sampled trace is traced.
            *("--otlp-traces-endpoint", collector.url, "--otlp-traces-sample-ratio", "0"),
            *ENGINE_FLAGS,
            env={"OTEL_BSP_SCHEDULE_DELAY": "50"},
        )
        started.append(fleet)
        yield fleet, both
    finally:
        for system in started:
            system.close()


@pytest.fixture(scope="session")
def reference(systems) -> Reference:
    return Reference(system=systems[1])


@pytest.fixture
async def fleet(systems):
    """Two prefill and two decode workers, all ready and idle."""
    async with SystemClient(system=systems[0]) as client:
        await client.all_ready()
        await client.settled()
        yield client


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """A worker of xdist that has run the last test on the systems ends them: a dozen idle processes are not free."""
    if hasattr(item.config, "workerinput") and _on_systems(item) and not _on_systems(nextitem):
        for system in item.config.stash.get(SYSTEMS, []):
            system.close()


def _on_systems(item: pytest.Item | None) -> bool:
    group = None if item is None else item.get_closest_marker("xdist_group")
    return group is not None and group.args == ("system",)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """Show the systems' logs with a failure."""
    outcome = yield
    report = outcome.get_result()
    if report.failed:
        report.sections += [(f"logs of {s.run_dir.name}", s.logs()) for s in item.config.stash.get(SYSTEMS, [])]
