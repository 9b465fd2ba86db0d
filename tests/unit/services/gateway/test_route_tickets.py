"""Requests that come with the ticket of a stand-alone router."""

import pytest

from tandem_engine.base.errors import DrainingError
from tandem_engine.messages.outputs import Finish, FinishReason
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_testing.gateway_builders import live_gateway
from tandem_testing.mock_engine import MockBehavior, hash_tokens
from tandem_testing.tokenizer_builders import EOS

TICKET = "0123456789abcdef" * 2
DRAINING = Finish(reason=FinishReason.ERROR, code=DrainingError.code, retryable=True)
HEADER = "x-tandem-reservation"


@pytest.fixture
async def two(rack, tokenizer: TextTokenizer):
    """Without a ticket the chooser takes the first of two engines."""
    for name in ("first", "second"):
        rack.add(name, MockBehavior(token=hash_tokens(3, 250), eos=EOS))
    async with live_gateway(rack.context, tokenizer, rack.engines) as live:
        yield live


async def where(gateway, ticket: str | None, **fields) -> tuple[str, str]:
    body = {"model": "mock", "prompt": "hi", "max_tokens": 2, **fields}
    answer = await gateway.http.post("/v1/completions", json=body, headers={HEADER: ticket} if ticket else {})
    assert answer.status_code == 200
    record = (await gateway.http.get(f"/v1/requests/{answer.headers['x-request-id']}/explain")).json()
    (attempt,) = record["choices"][0]["attempts"]
    return attempt["decode"].partition("@")[0], attempt["source"]


async def test_ticket_selects_worker_and_reservation_is_released(two, rack):
    two.chooser.tickets[TICKET] = rack.engines[1].view
    assert await where(two, TICKET) == ("second", "router")
    assert two.chooser.open == 0


async def test_choices_of_one_prompt_share_its_ticket(two, rack):
    two.chooser.tickets[TICKET] = rack.engines[1].view
    assert await where(two, TICKET, n=3, temperature=1.0) == ("second", "router")
    assert {len(engine.received) for engine in rack.engines} == {0, 3}
    assert two.chooser.open == 0


@pytest.mark.parametrize("ticket", [None, TICKET, "0" * 31, "0" * 33, "G" * 32, "../" + "0" * 29, "A" * 32])
async def test_without_a_ticket_that_holds_the_gateway_chooses(two, ticket):
    assert await where(two, ticket) == ("first", "local")


async def test_ticket_is_for_the_first_attempt_alone(rack, tokenizer):
    rack.add("good", MockBehavior(token=hash_tokens(3, 250), eos=EOS))
    bad = rack.add("bad", MockBehavior(token=hash_tokens(3, 250), eos=EOS, refuse=DRAINING))
    async with live_gateway(rack.context, tokenizer, rack.engines) as live:
        live.chooser.tickets[TICKET] = bad.view
        body = {"model": "mock", "prompt": "hi", "max_tokens": 2}
        answer = await live.http.post("/v1/completions", json=body, headers={HEADER: TICKET})
        record = (await live.http.get(f"/v1/requests/{answer.headers['x-request-id']}/explain")).json()
    attempts = record["choices"][0]["attempts"]
    assert [(each["decode"].partition("@")[0], each["source"]) for each in attempts] == [
        ("bad", "router"),
        ("good", "local"),
    ]
    assert live.chooser.open == 0
