"""A stand-alone router on a real Redis, asked over HTTP and by a real gRPC client."""

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tandem_engine.config import Role
from tandem_services.router_server.protos import router_pb2 as pb
from tandem_testing.router_builders import LASTING, PAGE, Fleet, chain_of, make_load, make_record
from tandem_testing.router_stack import MODEL, LiveRouter, live_router

PROMPT = tuple(number % 300 for number in range(20 * PAGE))
OTHER = tuple((7 * number + 1) % 300 for number in range(20 * PAGE))


@pytest.fixture
async def fleet(server, monkeypatch):
    monkeypatch.setattr("tandem_services.router.tickets.RESERVATION_MS", LASTING["RESERVATION_MS"])
    async with Fleet.of(server, **LASTING) as workers:
        yield workers


@pytest.fixture
async def live(server, fleet, tmp_path):
    """A pair, and a router with the tokenizer of its model."""
    for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
        await fleet.beat(make_record(name, role, model=MODEL))
    async with live_router(server, tmp_path, reservation_ttl_s=600.0) as router:
        yield router


async def choose(live: LiveRouter, status: int = 200, **fields):
    answer = await live.http.post("/v1/choose", json={"model": MODEL, "max_tokens": 16, **fields})
    assert answer.status_code == status, answer.text
    return answer.json()


def rpc(live: LiveRouter, method: str, ask, answer_type):
    call = live.channel.unary_unary(
        f"/tandem.router.v1.Router/{method}",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=answer_type.FromString,
    )
    return call(ask, timeout=60)


async def test_choice_lists_workers_addresses_and_cost_terms(live, fleet):
    await fleet.cache(make_record("d", Role.DECODE), chain_of(PROMPT[: 4 * PAGE]))
    chosen = await choose(live, token_ids=PROMPT)
    assert (chosen["source"], chosen["placement"]) == ("redis", "pair")
    assert chosen["prefill"]["request_endpoint"] == "tcp://p:5600"
    assert (chosen["decode"]["worker_id"], chosen["decode"]["peer_endpoint"]) == ("d", "tcp://d:5601")
    assert chosen["predicted_s"] == pytest.approx(sum(term["seconds"] for term in chosen["terms"]))
    assert {"prefill_compute", "transfer", "decode_load"} <= {term["name"] for term in chosen["terms"]}
    assert (chosen["prompt_tokens"], chosen["has_room"], chosen["expires_in_s"]) == (len(PROMPT), True, 600.0)


@pytest.mark.parametrize("parsed", [True, False])
async def test_prompts_hold_control_tokens_as_in_gateways(server, fleet, tmp_path, parsed):
    await fleet.beat(make_record("d", Role.BOTH, model=MODEL))
    async with live_router(server, tmp_path, parse_special_tokens=parsed) as live:
        text = "<|im_start|>hello"
        chosen = await choose(live, prompt=text, return_token_ids=True)
        tokenizer = live.server.api.reading.models[MODEL].prompts.tokenizer
        assert chosen["token_ids"] == tokenizer.encode(text, parse_special_tokens=parsed)
        assert tokenizer.encode(text, parse_special_tokens=parsed) != tokenizer.encode(
            text, parse_special_tokens=not parsed
        )


async def test_prefix_to_fetch_names_its_source(live, fleet):
    busy = make_record("q", Role.PREFILL, model=MODEL, load=make_load(queue_tokens=100_000, prefill_rate=10_000))
    await fleet.beat(busy)
    await fleet.cache(busy, chain_of(PROMPT))
    await live.router.refresh()
    chosen = await choose(live, token_ids=PROMPT)
    assert chosen["fetch"]["source"]["peer_endpoint"] == "tcp://q:5601"
    assert chosen["fetch"]["tokens"] == len(PROMPT)


async def test_reservation_counts_until_release(live):
    async def queue() -> float:
        chosen = await choose(live, token_ids=OTHER)
        await live.http.post("/v1/release", json={"reservation": chosen["reservation"]})
        return next(term["seconds"] for term in chosen["terms"] if term["name"] == "prefill_queue")

    first = await choose(live, token_ids=PROMPT)
    assert await queue() > 0
    release = {"reservation": first["reservation"]}
    assert (await live.http.post("/v1/release", json=release)).json() == {"released": True}
    assert (await live.http.post("/v1/release", json=release)).json() == {"released": False}
    assert await queue() == 0
    assert len(live.server.routing.holds) == 0


async def test_text_and_messages_are_read_with_the_models_tokenizer(live):
    text = await choose(live, prompt="hello world", return_token_ids=True)
    tokenizer = next(iter(live.server.picker.reading.models.values())).prompts.tokenizer
    assert text["token_ids"] == tokenizer.encode("hello world")
    messages = [{"role": "user", "content": "hello"}]
    chat = await choose(live, messages=messages, return_token_ids=True)
    expected = tokenizer.encode_chat(messages, add_generation_prompt=True, add_special_tokens=False)
    assert chat["token_ids"] == expected


async def test_choice_record_is_found_by_reservation_or_request_id(live):
    first = await choose(live, token_ids=PROMPT, request_id="mine")
    second = await choose(live, token_ids=PROMPT)
    await live.http.post("/v1/release", json={"reservation": first["reservation"]})
    for name in ("mine", first["reservation"]):
        record = (await live.http.get(f"/v1/choices/{name}")).json()
        assert (record["state"], record["interface"], record["choice"]) == ("released", "http", first)
    listed = (await live.http.get("/v1/choices?limit=1")).json()["choices"]
    assert [record["choice"]["reservation"] for record in listed] == [second["reservation"]]
    assert (await live.http.get("/v1/choices/nobody")).status_code == 404


async def test_grpc_choose_returns_a_prefill_and_decode_pair(live, fleet):
    ask = pb.ChooseRequest(model=MODEL, token_ids=pb.TokenIds(ids=PROMPT), max_tokens=16, request_id="g")
    chosen = await rpc(live, "Choose", ask, pb.ChooseResponse)
    assert (chosen.decode.request_endpoint, chosen.prefill.role) == ("tcp://d:5600", "prefill")
    assert chosen.predicted_s == pytest.approx(sum(term.seconds for term in chosen.terms))
    explained = await rpc(live, "Explain", pb.ExplainRequest(id="g"), pb.ExplainResponse)
    assert (explained.interface, explained.state, explained.choice) == ("grpc", "open", chosen)
    listed = await rpc(live, "ListWorkers", pb.ListWorkersRequest(model=MODEL), pb.ListWorkersResponse)
    assert {worker.incarnation for worker in listed.workers} == {"p@1", "d@1"}
    assert not (await rpc(live, "ListWorkers", pb.ListWorkersRequest(model="x"), pb.ListWorkersResponse)).workers
    release = pb.ReleaseRequest(reservation=chosen.reservation)
    assert (await rpc(live, "Release", release, pb.ReleaseResponse)).released
    assert not (await rpc(live, "Release", release, pb.ReleaseResponse)).released
    text = pb.ChooseRequest(model=MODEL, text="hello world", return_token_ids=True)
    messages = pb.ChooseRequest(model=MODEL, messages=pb.Messages(messages=[pb.Message(role="user", content="hi")]))
    assert (await rpc(live, "Choose", text, pb.ChooseResponse)).token_ids
    assert (await rpc(live, "Choose", messages, pb.ChooseResponse)).prompt_tokens > 2


BAD = {
    "two prompts": ({"token_ids": [1], "prompt": "x"}, 400, "token_ids"),
    "no prompt": ({}, 400, "token_ids"),
    "no tokens": ({"token_ids": []}, 400, "token_ids"),
    "a token that is none": ({"token_ids": [1, -1]}, 400, "token_ids"),
    "a token out of vocabulary": ({"token_ids": [1, 10**6]}, 400, "token_ids"),
    "no text": ({"prompt": ""}, 400, "prompt"),
    "no messages": ({"messages": []}, 400, "messages"),
    "a role that is none": ({"messages": [{"role": "x", "content": "y"}]}, 400, "messages[0].role"),
    "too many tokens": ({"token_ids": [1], "max_tokens": 0}, 400, "max_tokens"),
    "a field that is none": ({"token_ids": [1], "max_token": 5}, 400, "max_token"),
    "a long session": ({"token_ids": [1], "session": "x" * 600}, 400, "session"),
    "a long id": ({"token_ids": [1], "request_id": "x" * 200}, 400, "request_id"),
    "a long salt": ({"token_ids": [1], "cache_salt": "x" * 2000}, 400, "cache_salt"),
    "many excluded": ({"token_ids": [1], "exclude": ["x"] * 300}, 400, "exclude"),
    "a model without a name": ({"token_ids": [1], "model": ""}, 400, "model"),
    "text of a model without a tokenizer": ({"prompt": "x", "model": "other"}, 404, "model"),
    "tokens of a model without workers": ({"token_ids": [1], "model": "other"}, 503, None),
    "a prompt beyond the context": ({"token_ids": [1] * 5000}, 503, None),
}


async def test_bad_input_is_refused_with_the_field_at_fault(live):
    for name, (fields, status, param) in BAD.items():
        error = (await choose(live, status=status, **fields))["error"]
        assert error["param"] == param or param in error["message"], name
    assert len(live.server.routing.holds) == 0


BAD_CALLS = [
    (pb.ChooseRequest(model=MODEL), grpc.StatusCode.INVALID_ARGUMENT, "exactly one of"),
    (pb.ChooseRequest(model=MODEL, text=""), grpc.StatusCode.INVALID_ARGUMENT, "prompt has no tokens"),
    (
        pb.ChooseRequest(model=MODEL, messages=pb.Messages(messages=[pb.Message(role="x")])),
        grpc.StatusCode.INVALID_ARGUMENT,
        "role",
    ),
    (pb.ChooseRequest(model="other", text="x"), grpc.StatusCode.NOT_FOUND, "no tokenizer"),
    (pb.ChooseRequest(model="other", token_ids=pb.TokenIds(ids=[1])), grpc.StatusCode.UNAVAILABLE, "no worker"),
]


async def test_bad_input_over_grpc_has_the_code_of_its_status(live):
    for ask, code, text in BAD_CALLS:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rpc(live, "Choose", ask, pb.ChooseResponse)
        assert caught.value.code() is code
        assert text in caught.value.details()
    assert [*caught.value.trailing_metadata()] == [("retry-after", "2")]


async def test_low_priority_without_capacity_is_rejected(live, fleet):
    await fleet.beat(make_record("d", Role.DECODE, model=MODEL, load=make_load(sequences=64)))
    refused = await choose(live, status=429, token_ids=PROMPT, priority=-1)
    assert refused["error"]["code"] == "no_room"
    assert not (await choose(live, token_ids=PROMPT))["has_room"]
    ask = pb.ChooseRequest(model=MODEL, token_ids=pb.TokenIds(ids=PROMPT), priority=-1)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rpc(live, "Choose", ask, pb.ChooseResponse)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_choice_for_a_gateway_can_be_redeemed_once(server, live):
    chosen = await choose(live, token_ids=PROMPT, for_gateway=True)
    assert chosen["for_gateway"]
    assert (await choose(live, token_ids=PROMPT))["for_gateway"] is False
    key = f"tandem:{{default}}:ticket:{chosen['reservation']}"
    assert server.command("EXISTS", key) == ":1\r\n"
    await live.http.post("/v1/release", json={"reservation": chosen["reservation"]})
    assert server.command("EXISTS", key) == ":0\r\n"


async def test_grpc_health_and_reflection_cover_all_services(live):
    stub = health_pb2_grpc.HealthStub(live.channel)
    names = ("liveness", "readiness", "", "envoy.service.ext_proc.v3.ExternalProcessor", "tandem.router.v1.Router")
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING

    async def statuses() -> list[int]:
        asks = [health_pb2.HealthCheckRequest(service=name) for name in names]
        return [(await stub.Check(ask, timeout=60)).status for ask in asks]

    assert await statuses() == [serving] * 5
    live.server.health.drain()
    await live.server.grpc.report()
    assert await statuses() == [serving, *[not_serving] * 4]
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    async for answer in reflection_pb2_grpc.ServerReflectionStub(live.channel).ServerReflectionInfo(iter([ask])):
        assert {service.name for service in answer.list_services_response.service} >= set(names[3:])


async def test_router_server_requires_token_and_rereads_its_file(server, fleet, tmp_path):
    await fleet.beat(make_record("w", model=MODEL))
    token = tmp_path / "token"
    token.write_text("first\n")
    async with live_router(server, tmp_path / "m", token_file=token) as live:
        body = {"model": MODEL, "token_ids": [1, 2]}

        async def status(**headers: str) -> int:
            return (await live.http.post("/v1/choose", json=body, headers=headers)).status_code

        assert await status() == 401
        assert await status(authorization="Bearer second") == 401
        assert await status(authorization="Bearer first") == 200
        assert (await live.http.get("/ready")).status_code == 200
        assert (await live.http.get("/metrics")).status_code == 401
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rpc(live, "ListWorkers", pb.ListWorkersRequest(), pb.ListWorkersResponse)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        token.write_text("second, longer\n")
        assert await status(authorization="Bearer first") == 401
        token.write_text("second\n")
        assert await status(authorization="Bearer second") == 200
        token.unlink()
        assert await status(authorization="Bearer second") == 401


async def test_choices_without_redis_use_last_view_and_have_no_ticket(server, live):
    server.kill()
    try:
        chosen = await choose(live, token_ids=PROMPT, for_gateway=True)
        assert (chosen["source"], chosen["for_gateway"]) == ("local", False)
    finally:
        server.restart()


async def test_request_above_concurrency_limit_is_rejected(live):
    places = live.server.api.places
    places.take(places.most)
    assert (await choose(live, status=429, token_ids=PROMPT))["error"]["code"] == "router_busy"
    places.give(places.most)
    await choose(live, token_ids=PROMPT)


async def test_router_metrics_count_choices_and_rejections(live):
    await choose(live, token_ids=PROMPT)
    await choose(live, status=400)
    text = (await live.http.get("/metrics")).text
    assert 'tandem_router_choices_total{interface="http",placement="pair",source="redis"} 1.0' in text
    assert 'tandem_router_refusals_total{code="400",interface="http"} 1.0' in text
    assert "tandem_router_held_choices 1.0" in text


async def test_router_without_workers_is_not_ready(live):
    assert (await live.http.get("/ready")).status_code == 200
    for name in ("p", "d"):
        live.router.mark_dead(f"{name}@1")
    assert (await live.http.get("/ready")).json()["reasons"] == ["workers: no worker is registered"]
