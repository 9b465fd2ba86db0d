"""Time to first token of a small tenant while a large one sends requests with many choices, on a real system.

    python benchmarks/two_tenants.py [--seconds 20] [--rate 2] [--cases n,prompts] [--up "--prefill 1 --decode 1"]
                                     [--out r.json]

`tandem up` serves the bundled model with real workers, Redis and a key for each tenant. The small tenant streams
`--rate` short chats a second. In each case the large one keeps eight connections busy, each of which sends its next
request when the last one has ended:

    n            completions with n = 128
    best_of      completions with best_of = 20
    prompts      completions of 128 prompts each
    long_prompt  completions of prompts close to the context length
    long_output  completions of long outputs

A case runs between two phases of the small tenant alone, so that both are measured on the machine of that moment. The
result is the ratio of the small tenant's TTFT in the case to its TTFT alone, at p50 and p99; both should stay below 2
where every process has a core. A machine with fewer cores than processes shows a third phase: `machine`, in which the
large tenant sends the same requests to a second system. There the two tenants share the cores and nothing of Tandem, so
`machine_ratio` is what the cores cost, and `shared_ratio`, TTFT in the case over TTFT in that phase, what sharing a
system costs.
`parts` is where the time goes, by the record of each request (`explain`), as medians alone and in the case:

    admission   in the gateway's queue
    queue       in the queue of the engine that computes the prompt
    prefill     the steps of the prompt, until its first token
    gateway     the rest of what the gateway measures: reading, tokenizing, routing, the way to the worker and back
    client      what only the client measures
"""

import argparse
import asyncio
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / part) for part in ("engine", "services", "lab", "tests/support", "benchmarks")]

import httpx  # noqa: E402

from tandem_testing.key_files import key_of, write_keys  # noqa: E402
from tandem_testing.system import System  # noqa: E402

SMALL, LARGE = "small", "large"
CONNECTIONS = 8
SETTLE_S = 2.0
WORDS = "river fox boat stone bridge apple morning winter village baker garden island".split()

Body = dict[str, Any]


def words(random: Random, number: int) -> str:
    """Different for every request, so that no prefix cache has it."""
    return " ".join(random.choice(WORDS) for _ in range(number))


def completion(prompt: str | list[str], **fields: Any) -> Body:
    return {"model": "tandem-mini", "prompt": prompt, "ignore_eos": True, **fields}


CASES: dict[str, Callable[[Random], Body]] = {
    "n": lambda random: completion(words(random, 20), n=128, max_tokens=32),
    "best_of": lambda random: completion(words(random, 20), best_of=20, max_tokens=64),
    "prompts": lambda random: completion([words(random, 20) for _ in range(128)], max_tokens=32),
    "long_prompt": lambda random: completion(words(random, 1500), max_tokens=8),
    "long_output": lambda random: completion(words(random, 20), max_tokens=1000),
}


def headers(tenant: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key_of(tenant)}"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Chat:
    """One answered chat of the small tenant."""

    first_token_s: float
    """From the request to its first event with text."""
    answer_id: str


async def chat(client: httpx.AsyncClient, random: Random) -> Chat:
    """Raises for any status but 200."""
    message = {"role": "user", "content": words(random, 10)}
    body = {"model": "tandem-mini", "messages": [message], "max_tokens": 8, "stream": True, "ignore_eos": True}
    started = time.perf_counter()
    first, answer_id = None, ""
    async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers(SMALL)) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if first is not None or not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            answer_id = event["id"]
            if event["choices"][0]["delta"].get("content"):
                first = time.perf_counter() - started
    assert first is not None, "a stream without text"
    return Chat(first_token_s=first, answer_id=answer_id)


async def small_tenant(client: httpx.AsyncClient, rate: float, seconds: float, random: Random) -> list[Chat]:
    """Open loop: requests start at their times, regardless of earlier ones."""
    tasks = []
    for _ in range(round(rate * seconds)):
        tasks.append(asyncio.create_task(chat(client, random)))
        await asyncio.sleep(1 / rate)
    return list(await asyncio.gather(*tasks))


async def parts_of(client: httpx.AsyncClient, done: Chat) -> dict[str, float]:
    """Seconds of its first token by where they were spent."""
    response = await client.get(f"/v1/requests/{done.answer_id}/explain", headers=headers(SMALL))
    response.raise_for_status()
    record = response.json()["choices"][0]
    parts = {
        "admission": record["admission_s"] or 0.0,
        "queue": record["queue_s"] or 0.0,
        "prefill": record["prefill_s"] or 0.0,
    }
    parts["gateway"] = record["ttft_s"] - sum(parts.values())
    parts["client"] = done.first_token_s - record["ttft_s"]
    return parts


async def median_parts_ms(client: httpx.AsyncClient, chats: Sequence[Chat]) -> dict[str, float]:
    found = [await parts_of(client, each) for each in chats]
    return {name: percentile_ms([parts[name] for parts in found], 0.5) for name in found[0]}


async def large_tenant(
    client: httpx.AsyncClient, make: Callable[[Random], Body], random: Random, done: list[int]
) -> None:
    while True:
        response = await client.post("/v1/completions", json=make(random), headers=headers(LARGE))
        if response.status_code == 200:
            done.append(response.json()["usage"]["completion_tokens"])
        elif response.status_code in (429, 503):
            await asyncio.sleep(0.2)
        else:
            response.raise_for_status()


def percentile_ms(seconds: list[float], share: float) -> float:
    return round(sorted(seconds)[int(share * (len(seconds) - 1))] * 1000, 1)


@asynccontextmanager
async def large_load(url: str, name: str, random: Random) -> AsyncIterator[list[int]]:
    """The large tenant sends requests of case `name` to `url`. Yields the output tokens of each answered one."""
    done: list[int] = []
    async with httpx.AsyncClient(base_url=url, timeout=300.0, limits=httpx.Limits(max_connections=None)) as client:
        load = [asyncio.create_task(large_tenant(client, CASES[name], random, done)) for _ in range(CONNECTIONS)]
        await asyncio.sleep(SETTLE_S)
        try:
            yield done
        finally:
            for task in load:
                task.cancel()
            await asyncio.gather(*load, return_exceptions=True)
    await asyncio.sleep(SETTLE_S)


async def run_case(url: str, second_url: str, name: str, options: argparse.Namespace) -> dict[str, object]:
    random = Random(name)
    async with httpx.AsyncClient(base_url=url, timeout=300.0) as client:
        alone = await small_tenant(client, options.rate, options.seconds / 2, random)
        async with large_load(second_url, name, random):
            machine = await small_tenant(client, options.rate, options.seconds, random)
        async with large_load(url, name, random) as done:
            crowded = await small_tenant(client, options.rate, options.seconds, random)
        alone += await small_tenant(client, options.rate, options.seconds / 2, random)
        phases = {"alone": alone, "machine": machine, "crowded": crowded}
        parts = {phase: await median_parts_ms(client, chats) for phase, chats in phases.items()}
    result: dict[str, object] = {"large_requests": len(done), "large_tokens": sum(done), "parts": parts}
    for label, share in (("p50", 0.5), ("p99", 0.99)):
        base, on_machine, in_case = (
            percentile_ms([each.first_token_s for each in chats], share) for chats in phases.values()
        )
        result |= {f"alone_{label}_ms": base, f"machine_{label}_ms": on_machine, f"{label}_ms": in_case}
        result |= {f"machine_{label}_ratio": round(on_machine / base, 2), f"{label}_ratio": round(in_case / base, 2)}
        result[f"shared_{label}_ratio"] = round(in_case / on_machine, 2)
    print(name, result, file=sys.stderr, flush=True)
    return result


async def run_cases(url: str, second_url: str, options: argparse.Namespace) -> dict[str, dict[str, object]]:
    for each in (url, second_url):
        async with httpx.AsyncClient(base_url=each, timeout=300.0) as client:
            for _ in range(5):  # compiles nothing in the first figure
                await chat(client, Random(0))
    return {name: await run_case(url, second_url, name, options) for name in options.cases.split(",")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="duration of each phase (default: 20)")
    parser.add_argument("--rate", type=float, default=2.0, help="chats per second of the small tenant (default: 2)")
    parser.add_argument("--cases", default=",".join(CASES), help="cases to run (default: all)")
    parser.add_argument("--up", default="--prefill 1 --decode 1", help="flags of tandem up")
    parser.add_argument("--out", type=Path, help="file for the result")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        keys = write_keys(Path(folder), **{SMALL: {}, LARGE: {}})
        flags = ("--api-keys", str(keys), *shlex.split(options.up))
        with ExitStack() as stack:
            system, second = (
                stack.enter_context(closing(System.start(Path(folder) / name, *flags))) for name in ("run", "second")
            )
            cases = asyncio.run(run_cases(system.url, second.url, options))
    shown = {"seconds": options.seconds, "rate": options.rate, "up": options.up}
    text = json.dumps({"cores": os.cpu_count(), "options": shown, "cases": cases}, indent=2)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
