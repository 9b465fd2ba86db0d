"""Workers that answer after their connection was lost: the network failed, not they [cut-is-not-death]."""

import asyncio
import contextlib
from dataclasses import replace

import pytest

from tandem_engine.ipc.channels import IpcContext
from tandem_services.gateway.dispatch.engine_client import FIRST_PAUSE_S, STEADY_S, Revival
from tandem_testing.gateway_builders import events, live_gateway
from tandem_testing.loop_time import set_forward_until
from tandem_testing.mock_engine import MockBehavior, hash_tokens
from tandem_testing.service_clock import ServiceClock
from tandem_testing.tcp_proxy import CALM, TcpProxy, Weather
from tandem_testing.tokenizer_builders import EOS
from tandem_testing.waiting import until

PATIENCE_S = 60.0
TOKEN = hash_tokens(3, 250)


@contextlib.asynccontextmanager
async def proxied(engine):
    """A view of `engine` behind a proxy, and the proxy."""
    host, _, port = engine.view.request_endpoint.removeprefix("tcp://").rpartition(":")
    proxy = await TcpProxy.open(lambda: (host, int(port)))
    try:
        yield replace(engine.view, request_endpoint=f"tcp://127.0.0.1:{proxy.port}"), proxy
    finally:
        await proxy.close()


@pytest.fixture
def context():
    context = IpcContext()
    yield context
    context.close()


@pytest.fixture
def clock():
    return ServiceClock()


@pytest.fixture
def alive():
    return []


@pytest.fixture
def revival(context, clock, alive):
    return Revival(context=context, clock=clock, on_alive=alive.append, ask_every_s=0.02, ask_for_s=PATIENCE_S)


def behavior(**knobs) -> MockBehavior:
    return MockBehavior(token=TOKEN, eos=EOS, **knobs)


async def test_cutting_all_connections_keeps_all_streams(rack, tokenizer):
    """Every worker is lost in the same moment, and none has died: the streams resume where they were."""
    engines = [rack.add(name, behavior(hold_at=5)) for name in ("a", "b")]
    async with contextlib.AsyncExitStack() as stack:
        lines = [await stack.enter_async_context(proxied(engine)) for engine in engines]
        gateway = await stack.enter_async_context(live_gateway(rack.context, tokenizer, engines, recovery_s=20.0))
        # One stream on each worker: the chooser takes the first of the fleet.
        asked = []
        for number in (0, 1):
            gateway.chooser.fleet[:] = [lines[number][0]]
            asked.append(asyncio.create_task(gateway.complete([7, 8], max_tokens=60, stream=True, seed=1)))
            assert await asyncio.to_thread(
                engines[number].wait_until, lambda number=number: engines[number].emitted == 5
            )
        gateway.chooser.fleet[:] = [view for view, _ in lines]
        for engine, (_, proxy) in zip(engines, lines, strict=True):
            proxy.cut()
            engine.behavior.hold_at = None
        answers = [events(answer) for answer in await asyncio.gather(*asked)]
        await until(lambda: not gateway.chooser.dead, PATIENCE_S, "both are trusted again")
        assert sorted(gateway.chooser.revived) == ["a@1", "b@1"]
        metrics = (await gateway.http.get("/metrics")).text
        assert 'tandem_gateway_workers_answering_again_total{model_name="mock"} 2.0' in metrics
    texts = {"".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) for chunks in answers}
    assert len(texts) == 1
    assert all(chunk.get("error") is None for chunks in answers for chunk in chunks)


async def test_network_failure_of_live_workers_causes_no_quarantine(rack, tokenizer):
    """Two workers are lost with the request, which would quarantine it; but they answer again."""
    engines = [rack.add(name, behavior(mute=True)) for name in ("a", "b")]
    async with contextlib.AsyncExitStack() as stack:
        lines = [await stack.enter_async_context(proxied(engine)) for engine in engines]
        pings = {"ping_interval_s": 0.05, "unanswered_pings": 400}
        gateway = await stack.enter_async_context(
            live_gateway(rack.context, tokenizer, engines, recovery_s=20.0, **pings)
        )
        gateway.chooser.fleet[:] = [view for view, _ in lines]
        answering = asyncio.create_task(gateway.complete([7, 8], max_tokens=9, seed=1))
        for engine, (view, proxy) in zip(engines, lines, strict=True):
            assert await asyncio.to_thread(engine.wait_until, lambda engine=engine: len(engine.received) == 1)
            # By then the gateway has received the engine's acceptance of it.
            assert await asyncio.to_thread(engine.wait_for_pings, 3)
            proxy.cut()
            revived = gateway.chooser.revived
            await until(lambda view=view, revived=revived: view.incarnation in revived, PATIENCE_S, "it answers again")
        for engine in engines:
            engine.behavior.mute = False
        answer = await answering
    assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 9)


async def test_worker_is_asked_until_its_line_is_back(rack, revival, alive):
    async with proxied(rack.add("w", behavior())) as (view, proxy):
        proxy.weather = Weather(refusing=True)
        revival.ask(view)
        await until(lambda: proxy.connections >= 2, PATIENCE_S, "it was refused")
        assert alive == []
        proxy.weather = CALM
        await until(lambda: alive == ["w@1"], PATIENCE_S, "it has answered")
        assert revival.asking == frozenset()


async def test_worker_that_hung_and_wakes_is_trusted_again(rack, revival, alive):
    worker = rack.add("w", behavior(deaf=True))
    revival.ask(worker.view)
    await until(lambda: revival.asking == {"w@1"}, PATIENCE_S, "it is asked")
    worker.behavior.deaf = False
    await until(lambda: alive == ["w@1"], PATIENCE_S, "it has answered")


async def test_other_incarnation_at_address_does_not_revive_worker(rack, revival, alive):
    worker = rack.add("w", behavior())
    revival.ask(replace(worker.view, incarnation="w@0"))
    assert await asyncio.to_thread(worker.wait_until, lambda: worker.pings > 1), "it answers and is asked again"
    assert revival.asking == {"w@0"}
    await set_forward_until(lambda: not revival.asking, step_s=revival.ask_for_s, steps=2)
    assert alive == []


async def test_dead_worker_is_probed_for_a_limited_time(rack, revival, alive):
    worker = rack.add("w", behavior())
    await asyncio.to_thread(worker.stop)
    revival.ask(worker.view)
    await set_forward_until(lambda: not revival.asking, step_s=revival.ask_for_s, steps=3)
    assert alive == []


async def test_line_that_does_not_hold_is_tried_less_and_less_often(rack, revival, alive, clock):
    worker = rack.add("w", behavior())
    assert revival.pause_s("w@1") == 0.0
    revival.ask(worker.view)
    await until(lambda: alive == ["w@1"], PATIENCE_S, "it has answered")
    assert revival.pause_s("w@1") == FIRST_PAUSE_S
    clock.advance(1.0)
    revival.ask(worker.view)
    await until(lambda: alive == ["w@1"] * 2, PATIENCE_S, "it has answered again")
    assert revival.pause_s("w@1") == 2 * FIRST_PAUSE_S
    clock.advance(STEADY_S)
    assert revival.pause_s("w@1") == 0.0


async def test_closed_revival_stops_probing(rack, revival, alive):
    worker = rack.add("w", behavior(deaf=True))
    revival.ask(worker.view)
    revival.close()
    await until(lambda: not revival.asking, PATIENCE_S, "it is asked no longer")
    assert alive == []
