"""A whole system in a control group that allows no further thread or process, as `pids.max` of a pod may."""

import asyncio
import json
from collections.abc import Iterator

import httpx
import pytest

from tandem_services.gateway.http.body import PARSED_HERE_BYTES
from tandem_testing.control_groups import ControlGroup, can_limit, new_group, system_within
from tandem_testing.redis_server import REDIS_SERVER
from tandem_testing.system import System

AT_ONCE = 6
MODEL = "tandem-mini"
JSON = {"content-type": "application/json"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(REDIS_SERVER is None, reason="redis-server is not installed"),
    pytest.mark.skipif(not can_limit("pids"), reason="NOT CHECKED: no control group of processes can be made here"),
]


@pytest.fixture
def group() -> Iterator[ControlGroup]:
    with new_group("pids") as group:
        yield group


@pytest.fixture
def system(group, tmp_path) -> Iterator[System]:
    with system_within(group, tmp_path / "run") as system:
        yield system


def chat(number: int, **fields) -> tuple[str, dict]:
    messages = [{"role": "user", "content": f"hello {number}"}]
    return "/v1/chat/completions", {"model": MODEL, "messages": messages, "max_tokens": 8, **fields}


def completion(prompt: object) -> tuple[str, dict]:
    return "/v1/completions", {"model": MODEL, "prompt": prompt, "max_tokens": 2}


def crowd() -> list[tuple[str, dict]]:
    """What is computed by threads: long texts, several texts, bodies over 256 KiB."""
    requests = [chat(number) for number in range(AT_ONCE)]
    requests += [completion(f"{number} " + "the fox " * 900) for number in range(AT_ONCE)]
    requests += [completion([f"{number} {each}" for each in range(20)]) for number in range(AT_ONCE)]
    return requests + [chat(number, metadata={"long": "body"}) for number in range(AT_ONCE)]


def encoded(body: dict) -> bytes:
    """Bodies with metadata are so long that a thread decodes them."""
    text = json.dumps(body)
    return (text.ljust(2 * PARSED_HERE_BYTES) if "metadata" in body else text).encode()


async def answers(url: str, requests: list[tuple[str, dict]]) -> list[httpx.Response]:
    async with httpx.AsyncClient(base_url=url, timeout=240.0) as http:
        return await asyncio.gather(*(http.post(path, content=encoded(body), headers=JSON) for path, body in requests))


def test_thread_limit_fails_only_grammar_requests(system, group):
    # Those that run stay.
    group.limit(1)
    with system.no_restarts():
        served = asyncio.run(answers(system.url, crowd()))
        assert [response.text[:300] for response in served if response.status_code != 200] == []
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
        [refused] = asyncio.run(answers(system.url, [chat(0, response_format=form)]))
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert "compile the grammar" in refused.json()["error"]["message"]
        # There is room again.
        group.limit(group.used() + 100)
        [accepted] = asyncio.run(answers(system.url, [chat(0, response_format=form)]))
        assert accepted.status_code == 200
