"""A whole worker service with a mock engine process and a real Redis."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path

import httpx
import msgspec
import pytest

from tandem_engine.base.clock import MonotonicClock
from tandem_engine.config import Role
from tandem_engine.ipc.channels import IpcContext
from tandem_engine.messages.requests import Peer
from tandem_services.common.redis_client import RedisAddress, RedisUnavailableError
from tandem_services.router.cost import Demand, Load
from tandem_services.router.registry import WorkerState
from tandem_services.router.starting import StartingBoard
from tandem_services.worker.service import WorkerService
from tandem_testing.mock_engine_process import EngineRemote
from tandem_testing.redis_server import REDIS_SERVER, RedisServer
from tandem_testing.router_builders import MODEL, PAGE, Fleet, chain_of, make_record
from tandem_testing.running_worker import (
    PATIENCE_S,
    Running,
    config_for,
    find,
    http_client,
    order_headers,
    running,
    until,
)

pytestmark = pytest.mark.skipif(REDIS_SERVER is None, reason="redis-server is not installed")

ROOT = Path(__file__).resolve().parents[2]
PROMPT = tuple(range(8 * PAGE))
CHAIN = chain_of(PROMPT)


@pytest.fixture
def server():
    process = RedisServer.start()
    yield process
    process.resume()
    process.stop()


@pytest.fixture
async def fleet(server):
    async with Fleet.of(server) as workers:
        yield workers


@pytest.fixture
def remote(tmp_path):
    end = EngineRemote(tmp_path)
    yield end
    end.close()


@pytest.fixture(autouse=True)
def importable_mock(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(str(ROOT / p) for p in ("engine", "tests/support")))


@pytest.fixture
async def worker(server, remote, tmp_path):
    async with running(config_for(server, remote), remote, tmp_path) as service:
        yield service


async def matched(fleet: Fleet) -> int | None:
    demand = Demand(prompt_tokens=len(PROMPT), output_tokens=1, local_prefill_tokens=16)
    try:
        routed = await fleet.index.route(
            model=MODEL, demand=demand, page_size=PAGE, chain=b"".join(CHAIN), exclude=frozenset(), seed=1
        )
    except RedisUnavailableError:
        return None
    return None if routed is None else routed.matched_tokens


async def two_heartbeats(fleet: Fleet, incarnation: str) -> None:
    """Return when the worker has certainly read the registry as it is now."""
    leases = set()

    async def renewed_twice() -> bool:
        row = await fleet.client.command("HGET", fleet.keys.shared[0], incarnation)
        leases.add(bytes(row)[:8])
        return len(leases) == 3

    await until(renewed_twice)


def indexed(fleet: Fleet, blocks: int):
    async def condition() -> bool:
        return await matched(fleet) == blocks * PAGE

    return condition


def texts(*hashes: bytes) -> list[str]:
    return [each.hex() for each in hashes]


async def test_ready_of_starting_worker_names_engine_phase(server, fleet, remote, tmp_path):
    async with running(config_for(server, remote, "--loading"), remote, tmp_path) as worker:

        async def reasons() -> list[str]:
            return (await worker.get("/ready")).json()["reasons"]

        async def loads() -> bool:
            return "engine: loading the model (weights 25 % of 4.00 GiB)" in await reasons()

        await until(loads)
        board = StartingBoard(library=fleet.registry.library, keys=fleet.keys)

        async def reported() -> list[tuple[str, str, int]]:
            return [(each.incarnation, each.phase, each.total) for each in await board.read()]

        async def is_reported() -> bool:
            return await reported() == [(worker.service.incarnation, "weights", 4 << 30)]

        await until(is_reported)


async def test_worker_that_has_started_is_listed_no_more(fleet, worker):
    await until(worker.ready)
    board = StartingBoard(library=fleet.registry.library, keys=fleet.keys)

    async def forgotten() -> bool:
        return await board.read() == ()

    await until(forgotten)


async def test_worker_registers_when_its_engine_is_ready(fleet, worker):
    record = await until(lambda: find(fleet))
    assert record.view.incarnation == worker.service.incarnation
    assert record.view.role is Role.DECODE
    assert record.state is WorkerState.READY

    async def counted() -> bool:
        """Its engine's first statistics come after it is ready."""
        known = await find(fleet)
        return known is not None and known.load.room_tokens == 99 * PAGE

    await until(counted)
    await until(worker.ready)
    assert (await worker.get("/live")).status_code == 200


async def test_kv_events_reach_the_index_in_order(fleet, worker):
    worker.remote.send(store=texts(*CHAIN))
    worker.remote.send(remove=texts(*CHAIN[5:]))
    await until(indexed(fleet, 5))


async def test_missing_event_is_noticed_and_the_cache_replayed(fleet, worker):
    worker.remote.send(store=texts(*CHAIN[:3]))
    await until(indexed(fleet, 3))
    worker.remote.send(skip=True)
    worker.remote.send(store=texts(*CHAIN[3:6]))
    await until(indexed(fleet, 6))
    assert len(worker.remote.orders_of("replay")) == 1


async def test_after_a_wipe_the_worker_registers_again_and_replays(server, fleet, worker):  # [redis-is-optional]
    worker.remote.send(store=texts(*CHAIN))
    await until(indexed(fleet, 8))
    server.wipe()
    await until(indexed(fleet, 8))
    assert (await until(lambda: find(fleet))).view.incarnation == worker.service.incarnation


async def test_worker_survives_redis_restart_without_data(server, fleet, worker):
    await until(worker.ready)
    server.kill()
    worker.remote.send(store=texts(*CHAIN))
    assert (await worker.get("/ready")).status_code == 200
    server.restart()
    await until(indexed(fleet, 8))
    assert not worker.exit.done()


async def test_load_and_progress_are_reported(fleet, worker):
    worker.remote.send(stats={"waiting_tokens": 500, "running": 3, "free_pages": 10, "decode_step_s": 0.02})

    async def reported() -> Load | None:
        record = await find(fleet)
        return record.load if record is not None and record.load.queue_tokens == 500 else None

    load = await until(reported)
    assert (load.sequences, load.room_tokens, load.step_s) == (3, 10 * PAGE, 0.02)


async def test_busy_engine_without_progress_is_not_offered(fleet, worker):  # [loop-progress]
    worker.remote.send(stats={"running": 1}, freeze=True)

    async def in_state(state: WorkerState) -> bool:
        record = await find(fleet)
        return record is not None and record.state is state

    await until(lambda: in_state(WorkerState.STALLED))
    assert (await worker.get("/ready")).status_code == 503
    assert (await worker.get("/live")).status_code == 200
    worker.remote.send(freeze=False)
    await until(lambda: in_state(WorkerState.READY))


async def test_engine_exit_ends_worker_and_deregisters_it(fleet, worker):  # [engine-ends-worker]
    await until(lambda: find(fleet))
    os.kill(worker.remote.pid, signal.SIGKILL)
    assert await asyncio.wait_for(worker.exit, 60) == 1
    assert await find(fleet) is None


async def test_engine_that_refuses_its_model_gives_its_reason(server, remote, tmp_path, caplog):
    config = config_for(server, remote, "--fail", "no config.json in /nowhere")
    async with running(config, remote, tmp_path) as worker:
        assert await asyncio.wait_for(worker.exit, 60) == 3
    assert "no config.json in /nowhere" in caplog.text


async def test_newer_incarnation_ends_the_older_worker(fleet, worker):  # [newest-incarnation]
    await until(lambda: find(fleet))
    await fleet.beat(make_record("w1", number=9 * 10**18))
    assert await asyncio.wait_for(worker.exit, 60) == 1


async def test_engine_is_notified_when_peer_leaves_or_is_replaced(fleet, worker):
    await until(lambda: find(fleet))
    for name in ("p1", "p2"):
        await fleet.beat(make_record(name))
    await two_heartbeats(fleet, worker.service.incarnation)
    await fleet.registry.deregister("p1@1")
    await fleet.beat(make_record("p2", number=2))

    async def notified() -> bool:
        return len(worker.remote.orders_of("peer_gone")) == 2

    await until(notified)
    assert {order["incarnation"] for order in worker.remote.orders_of("peer_gone")} == {"p1@1", "p2@1"}


async def test_engine_is_notified_when_fenced_writer_exits(worker):  # [late-write]
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        endpoint = f"tcp://127.0.0.1:{stopped.getsockname()[1]}"
        writer = Peer(worker_id="p1", incarnation="p1@1", endpoint=endpoint, compat_hash="h")
        worker.remote.send(stats={"fenced_writers": [msgspec.to_builtins(writer)]})
        stopped.settimeout(PATIENCE_S)
        line, _ = await asyncio.to_thread(stopped.accept)
        assert worker.remote.orders_of("peer_ended") == []
    line.close()

    async def notified() -> bool:
        return [order["incarnation"] for order in worker.remote.orders_of("peer_ended")][:1] == ["p1@1"]

    await until(notified)


async def test_worker_drain_finishes_requests_and_exits_0(fleet, worker, caplog):  # [drain-loses-nothing]
    worker.remote.send(stats={"running": 2})

    async def busy() -> bool:
        record = await find(fleet)
        return record is not None and record.load.sequences == 2

    await until(busy)
    async with http_client() as client:
        assert (await client.post(worker.url + "/drain", json={}, headers=order_headers(worker.url))).status_code == 202

    async def draining() -> bool:
        record = await find(fleet)
        return record is not None and record.state is WorkerState.DRAINING

    await until(draining)
    assert await matched(fleet) is None
    assert (await worker.get("/ready")).status_code == 503

    async def notified() -> bool:
        return bool(worker.remote.orders_of("drain"))

    # The engine's own process is notified after Redis.
    await until(notified)
    assert not worker.exit.done()
    worker.remote.send(stats={"running": 0})
    assert await asyncio.wait_for(worker.exit, 60) == 0
    assert await find(fleet) is None
    assert worker.remote.orders_of("shutdown")
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


async def test_engine_that_is_to_lose_a_node_is_drained(fleet, worker):
    async def ready() -> bool:
        return await find(fleet) is not None

    await until(ready)
    worker.remote.send(drain_wanted="node 1 is to leave")
    assert await asyncio.wait_for(worker.exit, 60) == 0
    assert worker.remote.orders_of("drain")


async def test_standby_worker_is_registered_and_unroutable_until_offer(server, remote, tmp_path, fleet):
    async with running(config_for(server, remote, standby=True), remote, tmp_path) as worker:
        record = await until(lambda: find(fleet))
        assert record.state is WorkerState.STANDBY
        assert await matched(fleet) is None

        async def stands_by() -> bool:
            return (await worker.get("/ready")).json()["status"] == "standby"

        await until(stands_by)
        async with http_client() as client:
            assert (
                await client.post(worker.url + "/offer", json={}, headers=order_headers(worker.url))
            ).status_code == 200
        await until(worker.ready)
        await until(indexed(fleet, 0))
        assert (await find(fleet)).state is WorkerState.READY


async def test_standby_ends_when_worker_of_same_revision_serves(server, remote, tmp_path, fleet, monkeypatch):
    monkeypatch.setattr("tandem_services.worker.standby.UNTRIED_S", 0.0)
    async with running(config_for(server, remote, standby=True), remote, tmp_path) as worker:
        record = await until(lambda: find(fleet))
        other = make_record("p1", Role.PREFILL, compat_hash=record.view.compat_hash, model=record.view.model)
        await fleet.beat(replace(other, state=WorkerState.STANDBY))
        await two_heartbeats(fleet, worker.service.incarnation)
        assert (await find(fleet)).state is WorkerState.STANDBY

        async def offered() -> bool:
            await fleet.beat(other)  # whose lease may end before the worker looks
            return await worker.ready()

        await until(offered)


async def post_role(worker: Running, role: str) -> httpx.Response:
    async with http_client() as client:
        return await client.post(worker.url + "/role", json={"role": role}, headers=order_headers(worker.url))


async def test_role_flip_changes_only_the_role_in_registry(server, remote, tmp_path, fleet):
    config = config_for(server, remote, "--transport", "nixl")
    async with running(config, remote, tmp_path) as worker:
        before = await until(lambda: find(fleet))
        await until(worker.ready)
        answer = await post_role(worker, "prefill")
        assert (answer.status_code, answer.json()["message"]) == (200, "serving as prefill")

        async def changed() -> bool:
            record = await find(fleet)
            return record is not None and record.view.role is Role.PREFILL

        await until(changed)
        after = await find(fleet)
        assert after.view.incarnation == before.view.incarnation
        assert after.state is WorkerState.READY
        assert (await post_role(worker, "decode")).status_code == 200
        orders = remote.orders_of("decode_elsewhere")
        assert [order["wanted"] for order in orders] == [True, False]
        # As long as a drain: a request that no worker has taken by then is computed again elsewhere.
        assert orders[0]["within_s"] == config.drain_timeout_s


async def test_role_flip_without_transport_or_during_drain_is_rejected(worker, fleet):
    await until(lambda: find(fleet))
    await until(worker.ready)
    refused = await post_role(worker, "prefill")
    assert (refused.status_code, refused.json()["code"]) == (400, "config_error")
    assert "--transport nixl" in refused.json()["message"]
    worker.remote.send(stats={"running": 1})

    async def busy() -> bool:
        record = await find(fleet)
        return record is not None and record.load.sequences == 1

    await until(busy)
    worker.service.drain()
    assert (await post_role(worker, "both")).status_code == 409
    assert worker.remote.orders_of("decode_elsewhere") == []


async def test_drain_has_a_time_limit(server, remote, tmp_path, fleet):
    config = config_for(server, remote, drain_timeout_s=1.5)
    async with running(config, remote, tmp_path) as worker:
        await until(lambda: find(fleet))
        remote.send(stats={"running": 2})
        worker.service.drain()
        assert await asyncio.wait_for(worker.exit, 60) == 0


async def test_worker_ends_though_its_engine_takes_no_order_any_more(server, remote, tmp_path, fleet):
    """The engine was on its way out when the worker was notified to end: `Shutdown` could never be sent."""
    async with running(config_for(server, remote), remote, tmp_path) as worker:
        await until(lambda: find(fleet))
        remote.send(hang_up=True)

        async def hung_up() -> bool:
            return bool(remote.orders_of("hung_up"))

        await until(hung_up)
        worker.service.drain()
        worker.service.drain()

        async def deregistered() -> bool:
            return await find(fleet) is None

        await until(deregistered)
        remote.send(exit=0)
        assert await asyncio.wait_for(worker.exit, 60) == 0


async def test_audit_is_answered_by_the_engine(worker, fleet):
    await until(lambda: find(fleet))
    worker.remote.send(store=texts(*CHAIN))
    await until(indexed(fleet, 8))
    body = (await worker.get("/audit")).json()
    assert (body["problems"], body["tree_pages"], body["free_pages"]) == ([], 8, 91)


async def test_metrics_carry_the_engines_numbers(worker, fleet):
    worker.remote.send(stats={"running": 4, "output_tokens_total": 77})

    async def scraped() -> bool:
        return "tandem_worker_num_requests_running 4.0" in (await worker.get("/metrics")).text

    await until(scraped)
    text = (await worker.get("/metrics")).text
    assert "tandem_worker_generation_tokens_total 77.0" in text
    assert "tandem_worker_registered 1.0" in text


async def test_worker_start_without_redis_fails_and_hides_password(remote, tmp_path, server):
    address = RedisAddress(url="redis://:secret@127.0.0.1:1/0")
    config = config_for(server, remote, redis=address, redis_start_timeout_s=0.0)
    context = IpcContext()
    service = WorkerService(config, context, tmp_path, MonotonicClock())
    with pytest.raises(RedisUnavailableError, match="TANDEM_REDIS_URL") as caught:
        await service.run()
    assert "secret" not in str(caught.value)
    context.close()


@contextlib.asynccontextmanager
async def worker_process(server: RedisServer, remote: EngineRemote):
    paths = (str(ROOT / part) for part in ("engine", "services", "tests/support"))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tandem_testing.worker_process", server.url, str(remote.path)),
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )
    try:
        await asyncio.to_thread(remote.accept)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def test_engine_dies_with_the_worker_process(server, remote):
    async with worker_process(server, remote) as process:
        process.kill()
        await process.wait()

        async def engine_gone() -> bool:
            return not is_running(remote.pid)

        await until(engine_gone)


def is_running(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_sigterm_drains_and_exits_0(server, remote, fleet):
    async with worker_process(server, remote) as process:
        await until(lambda: find(fleet))
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 60) == 0
    assert remote.orders_of("drain")
    assert await find(fleet) is None
