"""Prefixes move between real workers, and every answer reads as if they had been computed."""

import asyncio
from random import Random
from typing import Any

import pytest

from tandem_testing.system_client import SystemClient
from tandem_testing.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("system")]

VIEW_DELAY_S = 120.0
"""Within which the index knows what a worker has cached, and a figure of what it costs to fetch it."""
WAVES_S = 150.0
LARGEST = 2
"""Waves after which they grow no more; each is twice the one before."""
PUBLISHED = 1024
"""Tokens of two chunks of a prompt: workers tell the index of each when it is computed, and are not waited for."""
QUESTION = 2200
"""Tokens: more than a decode worker may compute itself, so that another worker has to."""


def random_tokens(seed: int, count: int) -> tuple[int, ...]:
    return tuple(Random(seed).choices(range(20, 900), k=count))


async def answer(client: SystemClient, prompt: tuple[int, ...], max_tokens: int = 16) -> dict[str, Any]:
    return await client.complete(prompt, max_tokens=max_tokens)


async def record(fleet: SystemClient, answered: dict[str, Any]) -> dict[str, Any]:
    """What explain knows of the one choice of a request."""
    choices: list[dict[str, Any]] = (await fleet.get(f"/v1/requests/{answered['id']}/explain"))["choices"]
    return choices[0]


async def test_next_turn_brings_the_answer_back_from_the_decode_worker(fleet, reference):
    """Back-flow: the prefill worker has the first turn's prompt, the decode worker has its answer as well."""
    came: dict[str, Any] = {}

    async def flows_back() -> bool:
        seed = len(came) + 1
        first = random_tokens(seed, 800)
        output = await answer(fleet, first, max_tokens=400)
        spoken = await fleet.tokens(output["choices"][0]["text"])
        turn = (*first, *spoken, *random_tokens(100 + seed, QUESTION))
        again = await answer(fleet, turn)
        async with SystemClient(system=reference.system) as alone:
            expected = await answer(alone, turn)
        assert again["choices"][0]["text"] == expected["choices"][0]["text"]
        seen = await record(fleet, again)
        came[again["id"]] = seen
        (attempt,) = seen["attempts"]
        reported, fetch = attempt["fetch"], seen["fetch"]
        return bool(reported and reported["source"].startswith("decode") and fetch and fetch["pages"] > 0)

    await until(flows_back, VIEW_DELAY_S, "a prefix came from a decode worker", came.copy)
    newest = [*came.values()][-1]
    assert newest["fetch"]["peer"] == newest["attempts"][0]["fetch"]["source"]
    assert newest["fetch"]["bytes"] > 0
    assert 0 < newest["cache_hits"]["fetched"] <= newest["cached_tokens"]
    assert newest["cached_tokens"] >= 800
    await fleet.settled()


async def test_idle_prefill_worker_fetches_prefix_from_busy_one(fleet, reference):
    """Twelve prompts or more share a prefix that one prefill worker has, each with 700 tokens of its own.

    A second copy is priced at twice the prefix in tokens, whatever a worker's rate (`cost.copy_s`): 2,400. Prompts wait
    for that many at the first worker after the fourth of a burst. Later ones go to the other, which is idle. If it was
    held up in its last steps, it is taken for a slow worker until it is used again, which takes a larger burst.
    """
    waves: list[list[dict[str, Any]]] = []

    async def spreads() -> bool:
        random = Random(f"busy {len(waves)}")
        shared = tuple(random.choices(range(20, 900), k=1200))
        burst = 12 << min(len(waves), LARGEST)
        prompts = [(*shared, *random.choices(range(20, 900), k=700)) for _ in range(burst)]
        await answer(fleet, shared)
        answered = await asyncio.gather(*(answer(fleet, prompt, max_tokens=4) for prompt in prompts))
        async with SystemClient(system=reference.system) as alone:
            right = await asyncio.gather(*(answer(alone, prompt, max_tokens=4) for prompt in prompts))
        texts = [[each["choices"][0]["text"] for each in side] for side in (answered, right)]
        assert texts[0] == texts[1]
        waves.append([await record(fleet, each) for each in answered])
        return any(seen["fetch"] and seen["fetch"]["pages"] > 0 for seen in waves[-1])

    await until(spreads, WAVES_S, "a prefix was fetched", lambda: [seen["attempts"] for seen in waves[-1]])
    came = [seen for seen in waves[-1] if seen["fetch"] and seen["fetch"]["pages"] > 0]
    for seen in came:
        (attempt,) = seen["attempts"]
        assert seen["fetch"]["peer"] != attempt["prefill"], "those that wait for one prefix share a fetch"
        # All of the prefix but what its worker computed last, of which the index may have no event yet.
        assert seen["cached_tokens"] >= PUBLISHED
    computed_on = {attempt["prefill"] for seen in waves[-1] for attempt in seen["attempts"]}
    assert len(computed_on) == 2
    await fleet.settled()
