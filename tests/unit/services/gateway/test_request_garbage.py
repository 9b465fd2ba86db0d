"""Objects of a request that has ended are freed at once: what the garbage collector has to find delays all requests."""

import asyncio
import gc
import json

import pytest

from tandem_testing.gateway_builders import live_gateway
from tandem_testing.mock_engine import MockBehavior, hash_tokens

REQUESTS = 20
OF_A_REQUEST = {"Client", "RequestIdentity", "RequestRecord", "RequestResponseCycle", "ResponseBytes"}


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, stream: bool) -> None:
    message = {"role": "user", "content": "hi"}
    body = json.dumps({"model": "mock", "messages": [message], "max_tokens": 2, "stream": stream}).encode()
    fields = f"Host: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    head = f"POST /v1/chat/completions HTTP/1.1\r\n{fields}"
    writer.write(f"{head}\r\n\r\n".encode() + body)
    answer = await reader.readuntil(b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200")
    if stream:
        await reader.readuntil(b"\r\n0\r\n\r\n")
    else:
        await reader.readexactly(int(answer.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_ended_request_leaves_nothing_for_the_collector(rack, tokenizer, stream):
    rack.add("solo", MockBehavior(token=hash_tokens(3, 250)))
    async with live_gateway(rack.context, tokenizer, rack.engines) as live:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(live.url.rpartition(":")[2]))
        await ask(reader, writer, stream=stream)
        gc.collect()
        gc.disable()
        try:
            for _ in range(REQUESTS):
                await ask(reader, writer, stream=stream)
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            found = [type(each).__name__ for each in gc.garbage]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
            writer.close()
    assert OF_A_REQUEST.isdisjoint(found)
