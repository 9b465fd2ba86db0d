"""Prefixes move between real workers, and every answer reads as if they had been computed."""

from random import Random
from typing import Any

import pytest

from tandem_testing.system_client import SystemClient
from tandem_testing.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180), pytest.mark.xdist_group("system")]

TOLD_S = 30.0
"""Within which the index knows what a worker has cached, and a figure of what it costs to fetch it."""
QUESTION = 2200
"""Tokens: more than a decode worker may compute itself, so that somebody else has to."""


def random_tokens(seed: int, count: int) -> tuple[int, ...]:
    return tuple(Random(seed).choices(range(20, 900), k=count))


async def answer(client: SystemClient, prompt: tuple[int, ...], max_tokens: int = 16) -> dict[str, Any]:
    return await client.complete(prompt, max_tokens=max_tokens)


async def record(fleet: SystemClient, answered: dict[str, Any]) -> dict[str, Any]:
    """What explain knows of the one choice of a request."""
    choices: list[dict[str, Any]] = (await fleet.get(f"/v1/requests/{answered['id']}/explain"))["choices"]
    return choices[0]


async def test_the_next_turn_brings_the_answer_back_from_the_decode_worker(fleet, reference):
    """Back-flow: who computed the first turn has its prompt, who generated it has its answer as well."""
    came: dict[str, Any] = {}

    async def flows_back() -> bool:
        seed = len(came) + 1
        first = random_tokens(seed, 800)
        said = await answer(fleet, first, max_tokens=400)
        spoken = await fleet.tokens(said["choices"][0]["text"])
        turn = (*first, *spoken, *random_tokens(100 + seed, QUESTION))
        again = await answer(fleet, turn)
        async with SystemClient(system=reference.system) as alone:
            expected = await answer(alone, turn)
        assert again["choices"][0]["text"] == expected["choices"][0]["text"]
        seen = await record(fleet, again)
        came[again["id"]] = seen
        (attempt,) = seen["attempts"]
        told, fetch = attempt["fetch"], seen["fetch"]
        return bool(told and told["source"].startswith("decode") and fetch and fetch["pages"] > 0)

    await until(flows_back, TOLD_S, "a prefix came from a decode worker", came.copy)
    newest = [*came.values()][-1]
    assert newest["fetch"]["peer"] == newest["attempts"][0]["fetch"]["source"]
    assert newest["fetch"]["bytes"] > 0
    assert newest["cached_tokens"] >= 800
    await fleet.settled()
