"""A chat with a model whose layers keep states, on a prefill and a decode worker: what its second turn computes."""

import pytest

from tandem_testing.chaos.fleet import Fleet, Shape
from tandem_testing.tiny_checkpoints import write_tiny_checkpoint
from tandem_testing.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STORY = "A fox lives near a river, and an owl in the old oak above it. " * 4
NEW = 128
"""Tokens of a second turn that may be computed: to the last place at which a state is kept, and what is new."""
INDEXED_S = 60.0


@pytest.fixture
async def fleet(tmp_path):
    checkpoint = write_tiny_checkpoint("qwen3-next", tmp_path / "model")
    async with Fleet.running(tmp_path, Shape(prefill=1, decode=1, gateways=1), checkpoint=checkpoint) as running:
        yield running


async def test_second_turn_computes_at_most_128_tokens_and_explain_says_so(fleet):
    (gateway,) = fleet.gateways
    reported: list[dict] = []

    async def ask(messages: list[dict]) -> dict:
        body = {"model": fleet.model, "messages": messages, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        response = await fleet.http.post(f"{gateway.url}/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        return response.json()

    async def reused() -> bool:
        """The router learns a moment after the first turn where it is cached: was that too late, try another story."""
        messages = [{"role": "user", "content": f"{len(reported)}. {STORY}"}]
        first = await ask(messages)
        messages += [first["choices"][0]["message"], {"role": "user", "content": "And then?"}]
        reported.append(await ask(messages))
        return cached(reported[-1]) >= reported[-1]["usage"]["prompt_tokens"] - NEW

    await until(reused, INDEXED_S, "a second turn finds the first", lambda: [each["usage"] for each in reported])
    explained = (await fleet.http.get(f"{gateway.url}/v1/requests/{reported[-1]['id']}/explain")).json()
    assert explained["choices"][0]["cached_tokens"] == cached(reported[-1])


def cached(answer: dict) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]
