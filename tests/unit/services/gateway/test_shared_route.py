"""Each choice of an answer is admitted by itself, beside the others of its prompt where there is room."""

import asyncio

import pytest

from tandem_testing.gateway_builders import live_gateway
from tandem_testing.key_files import bearer, write_keys
from tandem_testing.mock_engine import MockBehavior, hash_tokens
from tandem_testing.waiting import until

TOKENS = 5

SEVERAL = pytest.mark.parametrize(
    "several",
    [("n", lambda count: count), ("best_of", lambda count: count), ("prompt", lambda count: ["hi"] * count)],
    ids=["n", "best_of", "prompts"],
)
"""A field of a completion that gives it so many choices."""


class Running:
    """Counts the requests that a mock worker has begun and not ended."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def token(self, request, position):
        self.now += position == 0
        self.most = max(self.most, self.now)
        self.now -= position == TOKENS - 1
        return 5


async def test_choices_beyond_room_wait_at_the_gateway(rack, tokenizer):
    running = Running()
    rack.add("solo", MockBehavior(token=running.token, step_s=0.01))
    async with live_gateway(rack.context, tokenizer, rack.engines) as live:
        live.chooser.room = 4
        answer = await live.complete("hi", n=20, max_tokens=TOKENS)
        assert (answer.status_code, len(answer.json()["choices"])) == (200, 20)
        assert running.most <= 4, "the worker never has more than it has room for"
        assert all(query.max_tokens == TOKENS for query in live.chooser.queries), "room is asked for one by one"
        await until(lambda: live.chooser.open == 0, 60, "every reservation is given back")


async def test_choices_of_one_tenant_leave_the_next_place_to_another(rack, tokenizer, tmp_path):
    """A tenant whose many choices wait is served in turn with one that comes later with a single one."""
    running = Running()
    rack.add("solo", MockBehavior(token=running.token, step_s=0.02))
    keys = write_keys(tmp_path, big={}, small={})
    async with live_gateway(rack.context, tokenizer, rack.engines, api_keys=keys) as live:
        live.chooser.room = 2

        async def ask(tenant: str, prompt: str, **fields) -> int:
            body = {"model": "mock", "prompt": prompt, "max_tokens": TOKENS, **fields}
            return (await live.http.post("/v1/completions", json=body, headers=bearer(tenant))).status_code

        floods = [asyncio.create_task(ask("big", "hi", n=30)) for _ in range(2)]
        await until(lambda: len(live.chooser.queries) > 4, 60, "the flood waits")
        assert await ask("small", "hello") == 200
        assert not any(flood.done() for flood in floods)
        assert [await flood for flood in floods] == [200, 200]
    queries = live.chooser.queries
    theirs = queries[0].token_ids
    own = [number for number, query in enumerate(queries) if query.token_ids != theirs]
    # Ids are of choices: those that were tried between the first and the last try of the small tenant's one.
    between = {query.request_id for query in queries[own[0] : own[-1]] if query.token_ids == theirs}
    assert len(between) <= 8


async def test_choices_beside_each_other_while_there_is_room(rack, tokenizer):
    for name in ("one", "two"):
        rack.add(name, MockBehavior(token=hash_tokens(3, 250)))
    async with live_gateway(rack.context, tokenizer, rack.engines) as live:
        await live.complete("hi", n=6, max_tokens=2)
        assert [len(engine.received) for engine in rack.engines] == [6, 0]
        further = live.chooser.queries[1:]
        assert len(further) == 5
        assert all(query.only == {rack.engines[0].view.incarnation} for query in further)


async def test_choices_of_one_prompt_probe_no_slow_worker(rack, tokenizer):
    """All of them would be computed there."""
    rack.add("solo", MockBehavior(token=hash_tokens(3, 250)))
    async with live_gateway(rack.context, tokenizer, rack.engines) as live:
        await live.complete("hi", n=2, max_tokens=1)
        await live.complete("hi", n=1, max_tokens=1)
        assert [query.may_probe for query in live.chooser.queries] == [False, False, True]


@SEVERAL
async def test_choices_count_each_against_the_limits_of_their_tenant(rack, tokenizer, tmp_path, several):
    name, value = several
    rack.add("solo", MockBehavior(token=hash_tokens(3, 250)))
    keys = write_keys(tmp_path, minute={"requests_per_minute": 5}, once={"concurrency": 5})
    async with live_gateway(rack.context, tokenizer, rack.engines, api_keys=keys) as live:

        async def ask(tenant: str, n: int) -> int:
            body = {"model": "mock", "prompt": "hi", "max_tokens": 1, name: value(n)}
            return (await live.http.post("/v1/completions", json=body, headers=bearer(tenant))).status_code

        assert [await ask("minute", 4), await ask("minute", 2), await ask("once", 6)] == [200, 429, 429]
        # Places are given back by what was refused, and by what has ended.
        assert [await ask("once", 5), await ask("once", 5)] == [200, 200]


@SEVERAL
async def test_choices_take_a_seat_each(rack, tokenizer, several):
    """Two places and six seats: eight choices wait for their turn, of nine one has no seat, and the request fails."""
    name, value = several
    rack.add("solo", MockBehavior(token=hash_tokens(3, 250), step_s=0.01))
    async with live_gateway(rack.context, tokenizer, rack.engines, max_waiting=6) as live:
        live.chooser.room = 2

        async def ask(count: int) -> int:
            body = {"model": "mock", "prompt": "hi", "max_tokens": 20, name: value(count)}
            return (await live.http.post("/v1/completions", json=body)).status_code

        assert await ask(8) == 200
        await until(lambda: live.chooser.open == 0, 60, "every reservation is given back")
        assert await ask(9) == 503
        await until(lambda: live.chooser.open == 0, 60, "those that were admitted are aborted")
        assert await ask(8) == 200, "the seats of those that waited are free"
