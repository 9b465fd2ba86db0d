"""One task per request, and what its cancellation becomes: a disconnect, a deadline, the end of a drain."""

import asyncio
import contextlib
import json

import pytest

from tandem_services.common.errors import ApiError
from tandem_services.gateway.http.interruption import Client, ClientGoneError, Closing, Limit
from tandem_testing.gateway_builders import live_gateway
from tandem_testing.loop_time import set_forward
from tandem_testing.mock_engine import MockBehavior, hash_tokens
from tandem_testing.tokenizer_builders import EOS
from tandem_testing.waiting import until

LONG_S = 600.0


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Work:
    """A request that waits, in the blocks of a generation."""

    def __init__(self, closing: Closing, seconds: float) -> None:
        self.client = Client()
        self.cleaned = 0
        self._closing = closing
        self._seconds = seconds
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        limit = Limit(self._closing, self._seconds)
        try:
            with self.client, limit:
                try:
                    await asyncio.Event().wait()
                finally:
                    self.cleaned += 1
        finally:
            limit.stop()

    async def error(self) -> BaseException | None:
        [error] = await asyncio.gather(self.task, return_exceptions=True)
        assert self.cleaned == 1
        assert self.task.cancelling() == 0 or self.task.cancelled()
        return error


async def test_disconnect_ends_the_work_as_client_gone():
    work = Work(Closing(), LONG_S)
    await turns()
    work.client.left()
    assert isinstance(await work.error(), ClientGoneError)


async def test_deadline_ends_the_work_as_504():
    work = Work(Closing(), 5.0)
    await turns()
    set_forward(5.0)
    error = await work.error()
    assert isinstance(error, ApiError)
    assert error.status == 504


@pytest.mark.parametrize("order", ["deadline first", "disconnect first"])
async def test_deadline_and_disconnect_at_once_are_a_disconnect(order):
    work = Work(Closing(), 5.0)
    await turns()
    loop = asyncio.get_running_loop()
    if order == "disconnect first":
        work.client.left()
        set_forward(5.0)
    else:
        loop.call_later(5.0, work.client.left)
        set_forward(5.0)
    assert isinstance(await work.error(), ClientGoneError)


async def test_end_of_drain_and_deadline_at_once_are_one_error():
    closing = Closing()
    work = Work(closing, 5.0)
    await turns()
    closing.end()
    set_forward(5.0)
    error = await work.error()
    assert isinstance(error, ApiError)
    assert error.status == 503


async def test_cancelled_from_outside_stays_cancelled():
    closing = Closing()
    work = Work(closing, 5.0)
    await turns()
    work.task.cancel()
    closing.end()
    assert isinstance(await work.error(), asyncio.CancelledError)


async def test_cleanup_after_a_deadline_is_not_cut_short():
    """One cancel alone is sent: a second one would end what gives back reservations."""
    cleaning, may_end = asyncio.Event(), asyncio.Event()
    limit, client = Limit(Closing(), 5.0), Client()

    async def work() -> None:
        with client, limit:
            try:
                await asyncio.Event().wait()
            finally:
                cleaning.set()
                await may_end.wait()

    task = asyncio.create_task(work())
    await turns()
    set_forward(5.0)
    await cleaning.wait()
    set_forward(LONG_S)
    await turns()
    assert not task.done()
    may_end.set()
    [error] = await asyncio.gather(task, return_exceptions=True)
    assert isinstance(error, ApiError)
    assert error.status == 504


async def test_swallowed_cancel_leaves_the_end_to_the_worker(rack, tokenizer, monkeypatch):
    engine = rack.add("solo", MockBehavior(token=hash_tokens(3, 250), eos=EOS))
    async with live_gateway(rack.context, tokenizer, rack.engines) as gateway:
        choose = gateway.chooser.choose

        async def swallowing(query):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            return await choose(query)

        monkeypatch.setattr(gateway.chooser, "choose", swallowing)
        answer = await gateway.complete("hi", timeout=0.1)
        # The mock engine answers although its time is over.
        assert answer.status_code == 200
        assert [request.deadline_s for request in engine.received] == [0.0]
        assert gateway.chooser.open == 0


async def test_deadline_between_blocks_is_raised_by_the_next():
    limit = Limit(Closing(), 5.0)
    with limit:
        pass
    set_forward(5.0)
    await turns()
    with pytest.raises(ApiError) as caught, limit:
        pytest.fail("the time is over")
    assert caught.value.status == 504


async def test_client_that_left_before_the_block_gets_no_work():
    client = Client()
    client.left()
    with pytest.raises(ClientGoneError), client:
        pytest.fail("no client is left")


async def test_client_that_leaves_behind_the_block_cancels_nothing():
    client = Client()
    with client:
        pass
    client.left()
    await turns()


async def test_disconnect_ends_every_pipelined_request(rack, tokenizer):
    """The first is being answered; the second has come whole and waits for it."""
    engine = rack.add("solo", MockBehavior(token=hash_tokens(3, 250), eos=EOS, mute=True))
    body = json.dumps({"model": "mock", "prompt": "a", "max_tokens": 4}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    request = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    async with live_gateway(rack.context, tokenizer, rack.engines) as gateway:
        host, port = gateway.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(request + request)
        assert await asyncio.to_thread(engine.wait_until, lambda: len(engine.received) == 1)
        writer.close()
        assert await asyncio.to_thread(engine.wait_until, lambda: len(engine.aborted) == 1)
        await until(lambda: gateway.chooser.open == 0, 20.0, "its reservation is given back")
        metrics = (await gateway.http.get("/metrics")).text
        assert 'tandem_gateway_client_disconnects_total{model_name="mock"} 1.0' in metrics
        assert len(engine.received) == 1
