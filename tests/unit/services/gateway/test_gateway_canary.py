"""Canaries of the operator: through a named pair, through the router's choice, and their errors."""

from contextlib import asynccontextmanager
from dataclasses import replace

import httpx
import pytest

from tandem_engine.base.clock import MonotonicClock
from tandem_engine.config import Role
from tandem_engine.messages.outputs import Finish, FinishReason
from tandem_services.common.health import Health
from tandem_services.common.metrics import render
from tandem_services.gateway.admin import OUTPUT_TOKENS, create_admin_app
from tandem_services.gateway.app import build_gateway
from tandem_testing.gateway_builders import FakeChooser, SessionShelf, config_of, fleet_of
from tandem_testing.healthy_engines import healthy
from tandem_testing.key_files import bearer, write_keys
from tandem_testing.metric_text import metric_sum

TOKEN = "t" * 64


@asynccontextmanager
async def admin_port(rack, tokenizer, *, address: str = "127.0.0.1", keys=None, brings_token: bool = True):
    """A client of the administrators' port of a gateway in front of the rack, and the gateway."""
    config = config_of(admin_port=1, api_keys=keys)
    chooser = FakeChooser([engine.view for engine in rack.engines])
    fleet = fleet_of(config, chooser, SessionShelf(), rack.context, tokenizer)
    gateway = build_gateway(config, [fleet], clock=MonotonicClock(), health=Health())
    gateway = replace(gateway, order_access=replace(gateway.order_access, token=TOKEN))
    headers = {"authorization": f"Bearer {TOKEN}"} if brings_token else {}
    app = create_admin_app(gateway, drain=lambda: None)
    transport = httpx.ASGITransport(app=app, client=(address, 5))
    try:
        async with httpx.AsyncClient(
            transport=transport, base_url="http://gateway", timeout=20.0, headers=headers
        ) as client:
            yield client, gateway
    finally:
        await gateway.close()


async def canary(client: httpx.AsyncClient, **body):
    answer = await client.post("/canary", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_through_a_named_pair(rack, tokenizer):
    for name in ("p0", "p1"):
        rack.add(name, healthy(), Role.PREFILL)
    for name in ("d0", "d1"):
        rack.add(name, healthy(), Role.DECODE)
    async with admin_port(rack, tokenizer) as (client, gateway):
        report = await canary(client, prefill="p1", decode="d1")
        assert report["passed"], report
        assert (report["prefill"], report["decode"], report["tokens"]) == ("p1", "d1", OUTPUT_TOKENS)
        assert report["pages"] > 0
        text = (await render(gateway.registry)).decode()
    received = {engine.worker_id: len(engine.received) for engine in rack.engines}
    assert received == {"p0": 0, "p1": 1, "d0": 0, "d1": 1}
    assert metric_sum(text, "tandem_gateway_choices_total") == 0, "it is nobody's request"
    assert metric_sum(text, "tandem_gateway_asked_prompt_tokens_total") == 0, "it keeps no service from scaling to zero"


async def test_canary_is_greedy_short_bounded_and_shares_no_prefix(rack, tokenizer):
    rack.add("p", healthy(), Role.PREFILL)
    rack.add("d", healthy(), Role.DECODE)
    async with admin_port(rack, tokenizer) as (client, _):
        assert (await canary(client))["passed"]
        assert (await canary(client))["passed"]
    first, second = rack.engines[0].received
    assert first.sampling.greedy
    assert first.sampling.max_tokens == OUTPUT_TOKENS
    assert 0 < first.deadline_s <= 20.0
    assert first.cache_salt != second.cache_salt


async def test_through_the_router(rack, tokenizer):
    rack.add("p", healthy(), Role.PREFILL)
    rack.add("d", healthy(), Role.DECODE)
    async with admin_port(rack, tokenizer) as (client, gateway):
        report = await canary(client)
        assert (report["passed"], report["prefill"], report["decode"]) == (True, "p", "d")
        [service] = gateway.models
        assert service.chooser.open == 0, "what was reserved is given back"


async def test_canary_may_name_a_model(rack, tokenizer):
    rack.add("p", healthy(), Role.PREFILL)
    rack.add("d", healthy(), Role.DECODE)
    async with admin_port(rack, tokenizer) as (client, gateway):
        [service] = gateway.models
        assert (await canary(client, model=service.model.name))["passed"]
        gateway.models.unserved = {"later": "its Redis is away"}
        messages = [(await canary(client, model=name))["message"] for name in ("later", "other")]
    assert messages == [
        "model 'later' is not served here yet: its Redis is away",
        "model 'other' is not served here yet",
    ]


async def failed(rack, tokenizer, **body) -> str:
    async with admin_port(rack, tokenizer) as (client, _):
        report = await canary(client, **body)
    assert not report["passed"]
    return report["message"]


async def test_worker_that_is_not_there_is_named(rack, tokenizer):
    rack.add("p", healthy(), Role.PREFILL)
    assert await failed(rack, tokenizer, prefill="p", decode="d9") == "worker d9 is not registered"


async def test_without_a_prefill_worker_there_is_no_pair(rack, tokenizer):
    rack.add("d", healthy(), Role.DECODE)
    assert await failed(rack, tokenizer) == "no prefill worker can be paired with d"


async def test_canary_without_workers_fails_with_the_reason(rack, tokenizer):
    assert (await failed(rack, tokenizer)).startswith("no worker can serve it")


async def test_workers_of_other_weights_fail_canary_and_are_named(rack, tokenizer):
    """What of a version skew reaches a condition of the ModelService [same-kind-paired]."""
    rack.add("p", healthy(), Role.PREFILL)
    rack.add("d", healthy(), Role.DECODE)
    async with admin_port(rack, tokenizer) as (client, gateway):
        [service] = gateway.models
        service.chooser.fleet = [replace(view, compat_hash=view.worker_id) for view in service.chooser.fleet]
        report = await canary(client, prefill="p", decode="d")
    assert not report["passed"]
    assert report["message"] == "p and d hold other weights or another layout of KV"
    assert [engine.received for engine in rack.engines] == [[], []]


async def test_silent_worker_fails_the_canary_within_its_time_limit(rack, tokenizer):
    rack.add("p", healthy(), Role.PREFILL)
    rack.add("d", healthy(mute=True), Role.DECODE)
    assert await failed(rack, tokenizer, prefill="p", decode="d", within_s=0.3) == "no answer within 0.3 s"


async def test_worker_that_errs_fails_it(rack, tokenizer):
    broken = Finish(reason=FinishReason.ERROR, code="transfer_failed", error="no", retryable=True)
    rack.add("p", healthy(), Role.PREFILL)
    rack.add("d", healthy(refuse=broken), Role.DECODE)
    message = await failed(rack, tokenizer, prefill="p", decode="d")
    assert "worker_error" in message
    assert "transfer_failed" in message


@pytest.mark.parametrize(
    "body", [{"prefill": "p"}, {"decode": "d"}, {"within_s": 0}, {"within_s": 1e9}, {"role": "x"}, {"prefill": ""}, []]
)
async def test_questions_that_make_no_sense(rack, tokenizer, body):
    async with admin_port(rack, tokenizer) as (client, _):
        assert (await client.post("/canary", json=body)).status_code == 400


@pytest.mark.parametrize("address", ["10.0.0.7", "127.0.0.1", "::1"])
@pytest.mark.parametrize("keyed", [False, True])
async def test_canary_needs_the_order_token(rack, tokenizer, tmp_path, address, keyed):
    keys = write_keys(tmp_path, root={"admin": True}) if keyed else None
    body = {"prefill": "p", "decode": "d"}
    async with admin_port(rack, tokenizer, address=address, keys=keys, brings_token=False) as (client, _):
        for wrong in ({}, bearer("root"), {"authorization": f"Bearer {TOKEN}x"}):
            assert (await client.post("/canary", json=body, headers=wrong)).status_code == 401
    async with admin_port(rack, tokenizer, address=address, keys=keys) as (client, _):
        assert (await client.post("/canary", json=body)).status_code == 200
        foreign = {"origin": "http://evil.example"}
        assert (await client.post("/canary", json=body, headers=foreign)).status_code == 403
