"""The only decode worker dies and its successor takes long to start: new requests wait for it."""

import asyncio
import os
import signal

import httpx
import pytest

from tandem_testing.metric_text import metric_sum
from tandem_testing.redis_server import REDIS_SERVER
from tandem_testing.system import START_TIMEOUT_S, System
from tandem_testing.waiting import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(REDIS_SERVER is None, reason="redis-server is not installed"),
]

FLAGS = ("--prefill", "1", "--decode", "1", "--threads", "1", "--kv-cache-gib", "0.05")
SLOW_S = 13.0
"""The engine is stopped for this long: more than a request waits for a worker without reports."""
REQUESTS = 12


async def answer(http: httpx.AsyncClient, number: int) -> tuple[int, str, str]:
    """Status and body of one request, and how its stream ended; every second one is streamed."""
    body = {"model": "tandem-mini", "prompt": f"Request {number}:", "max_tokens": 4, "stream": number % 2 == 0}
    response = await http.post("/v1/completions", json=body)
    text = response.text
    return response.status_code, text, "[DONE]" if text.rstrip().endswith("[DONE]") else ""


async def held(http: httpx.AsyncClient) -> float:
    return metric_sum((await http.get("/metrics")).text, "tandem_gateway_num_requests_held")


def engines_of(system: System, worker_id: str) -> set[int]:
    found = (each for each in system.processes() if each.argv[2:4] == ("tandem_engine.cli", "serve"))
    return {each.pid for each in found if each.flag("--worker-id") == worker_id}


async def test_slow_successor_of_the_only_decode_worker_is_waited_for(tmp_path):
    system = System.start(tmp_path / "run", *FLAGS)
    try:
        before = system.engine_pid("decode-0")
        os.kill(system.service_pid("decode-0"), signal.SIGKILL)
        os.kill(before, signal.SIGKILL)
        async with httpx.AsyncClient(base_url=system.url, timeout=START_TIMEOUT_S) as http:
            await until(lambda: engines_of(system, "decode-0") - {before} != set(), START_TIMEOUT_S, "a new engine")
            [engine] = engines_of(system, "decode-0") - {before}
            os.kill(engine, signal.SIGSTOP)
            tasks: list[asyncio.Task[tuple[int, str, str]]] = []

            async def one_is_held() -> bool:
                """Until the gateway knows that the worker is gone, requests are sent there, and sent again later."""
                tasks.append(asyncio.create_task(answer(http, len(tasks))))
                await asyncio.sleep(0.5)
                return await held(http) > 0

            await until(one_is_held, START_TIMEOUT_S, "the gateway holds a request")
            lost = len(tasks) - round(await held(http))
            tasks += [asyncio.create_task(answer(http, number)) for number in range(len(tasks), len(tasks) + REQUESTS)]
            await asyncio.sleep(SLOW_S)
            assert not any(task.done() for task in tasks), system.logs()
            assert (await http.get("/ready")).status_code == 200
            os.kill(engine, signal.SIGCONT)
            answers = await asyncio.gather(*tasks)
            metrics = (await http.get("/metrics")).text
        assert {status for status, _, _ in answers} == {200}, answers
        assert not any('"error"' in text for _, text, _ in answers), answers
        assert all(end == ("" if number % 2 else "[DONE]") for number, (_, _, end) in enumerate(answers)), answers
        assert (
            metric_sum(metrics, 'tandem_gateway_worker_start_wait_seconds_count{outcome="served"}')
            == len(answers) - lost
        )
    finally:
        system.close()
