"""The worker that computes a prompt gets the source of its cached prefix; no other worker does."""

import pytest

from tandem_engine.config import Role
from tandem_engine.messages.requests import HandoffSide, PrefixFetch
from tandem_services.router.decision import PlannedFetch
from tandem_testing.gateway_builders import live_gateway
from tandem_testing.healthy_engines import healthy
from tandem_testing.router_builders import make_view

SOURCE = make_view("elsewhere", Role.DECODE)
PLANNED = PlannedFetch(source=SOURCE, tokens=48, seconds=0.01, within_s=0.5)


@pytest.fixture
def gateway(rack, tokenizer):
    return lambda **config: live_gateway(rack.context, tokenizer, rack.engines, **config)


def check(fetch: PrefixFetch | None) -> None:
    assert fetch is not None
    assert (fetch.peer.incarnation, fetch.peer.endpoint) == (SOURCE.incarnation, SOURCE.peer_endpoint)
    assert (fetch.tokens, fetch.within_s) == (48, 0.5)


async def test_fetch_of_a_pair_is_sent_to_the_prefill_worker(rack, gateway):
    prefill, decode = rack.add("p", healthy(), Role.PREFILL), rack.add("d", healthy(), Role.DECODE)
    async with gateway() as live:
        live.chooser.fetch = PLANNED
        assert (await live.complete(max_tokens=4)).status_code == 200
    [send], [receive] = prefill.received, decode.received
    assert send.handoff.side is HandoffSide.SEND
    check(send.fetch)
    assert receive.fetch is None


async def test_aggregated_worker_gets_fetch_plan_and_explain_shows_it(rack, gateway):
    alone = rack.add("solo", healthy())
    async with gateway() as live:
        live.chooser.fetch = PLANNED
        answer = (await live.complete(max_tokens=4)).json()
        record = (await live.http.get(f"/v1/requests/{answer['id']}/explain")).json()
    check(alone.received[0].fetch)
    [attempt] = record["choices"][0]["attempts"]
    assert attempt["fetch"] == {"source": SOURCE.incarnation, "tokens": 48, "seconds": 0.01}


async def test_request_without_fetch_plan_has_no_fetch_field(rack, gateway):
    alone = rack.add("solo", healthy())
    async with gateway() as live:
        await live.complete(max_tokens=4)
    assert alone.received[0].fetch is None
