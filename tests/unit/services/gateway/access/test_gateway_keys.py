"""A gateway with a key file, as its clients meet it: authentication, and what they may use [keys-on-every-route]."""

import asyncio
import logging
import re

import pytest

from tandem_services.common.redis_client import RedisUnavailableError
from tandem_testing.gateway_builders import live_gateway
from tandem_testing.key_files import bearer, key_of, write_keys
from tandem_testing.mock_engine import MockBehavior, hash_tokens
from tandem_testing.tokenizer_builders import EOS
from tandem_testing.waiting import until

CHAT = {"model": "mock", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
RESPONSE = {"model": "mock", "input": "hi", "max_output_tokens": 4}
SESSION = {"model": "mock", "prompt": "hi", "max_tokens": 3, "session_params": {"id": "s", "turn": 0}}

TENANTS = {
    "ann": {},
    "bob": {"priority": 5},
    "pool-a": {"share_cache": True},
    "pool-b": {"share_cache": True},
    "other": {"models": ["another"]},
    "root": {"admin": True},
    "rpm": {"requests_per_minute": 2},
    "tpm": {"tokens_per_minute": 100},
    "single": {"concurrency": 1},
}


as_chat_and_response = pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/responses", RESPONSE)], ids=["chat", "response"]
)


class DeadBoard:
    """Redis is away."""

    async def take(self, *_: object) -> None:
        raise RedisUnavailableError("no answer")

    async def settle(self, *_: object, **__: object) -> None:
        raise RedisUnavailableError("no answer")

    async def renew(self, *_: object) -> None:
        raise RedisUnavailableError("no answer")

    async def sync(self, *_: object) -> None:
        raise RedisUnavailableError("no answer")


@pytest.fixture
def keys(tmp_path):
    return write_keys(tmp_path, **TENANTS)


@pytest.fixture
async def guarded(rack, tokenizer, keys):
    rack.add("solo", MockBehavior(token=hash_tokens(3, 250), eos=EOS))
    async with live_gateway(rack.context, tokenizer, rack.engines, api_keys=keys) as live:
        yield live


async def ask(gateway, tenant: str, path: str = "/v1/chat/completions", body=CHAT, **fields):
    return await gateway.http.post(path, json={**body, **fields}, headers=bearer(tenant))


# Authentication


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("Authorization", "")],
        [("Authorization", "Bearer")],
        [("Authorization", "Basic a2V5LW9mLWFubg==")],
        [("Authorization", key_of("ann"))],
        [("Authorization", f"Bearer {key_of('ann')} {key_of('ann')}")],
        [("Authorization", f"Bearer,{key_of('ann')}")],
        [("Authorization", "Bearer unknown")],
        [("Authorization", f"Bearer {key_of('ann')}x")],
        [("Authorization", f"Bearer {key_of('ann').upper()}")],
        [("Authorization", "Bearer schlüssel".encode())],
        [("Authorization", "Bearer " + "k" * 10_000)],
        [("Authorization", f"Bearer {key_of('ann')}"), ("Authorization", f"Bearer {key_of('ann')}")],
        [("Authorization", f"Bearer {key_of('ann')}"), ("Authorization", "Bearer unknown")],
    ],
)
async def test_request_without_valid_key_is_401(guarded, rack, headers):  # [keys-on-every-route]
    answer = await guarded.http.post("/v1/chat/completions", json=CHAT, headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.headers["x-request-id"]
    error = answer.json()["error"]
    assert (set(error), error["code"]) == ({"message", "type", "param", "code"}, "invalid_api_key")
    assert "key-of" not in answer.text
    assert not rack.engines[0].received


async def test_megabyte_of_key_is_refused(guarded):  # [keys-on-every-route]
    answer = await guarded.http.get("/v1/models", headers={"Authorization": "Bearer " + "k" * 60_000})
    assert answer.status_code in (400, 401, 431)


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "Bearer  "])
async def test_valid_key_is_accepted(guarded, scheme):
    headers = {"Authorization": f"{scheme} {key_of('ann')}"}
    assert (await guarded.http.get("/v1/models", headers=headers)).status_code == 200


async def test_every_path_needs_a_key_but_those_of_probes(guarded):  # vLLM: unguarded siblings
    paths = ["/v1/models", "/version", "/metrics", "/tokenize", "/v1/sessions", "/open_session", "/nope", "/", "//live"]
    paths += ["/v1/responses", "/live/", "/Live", "/v1/requests/x/explain", "/docs", "/openapi.json"]
    for path in paths:
        for method in ("GET", "POST", "DELETE", "OPTIONS", "TRACE"):
            assert (await guarded.http.request(method, path)).status_code == 401, (method, path)
    for path in ("/live", "/ready", "/health"):
        assert (await guarded.http.get(path)).status_code == 200


@pytest.mark.parametrize("host", ["x/live?", "x#", "/live", "x/live"])
async def test_host_header_opens_no_door(guarded, host):  # Starlette CVE-2026-48710
    answer = await guarded.http.get("/v1/models", headers={"Host": host})
    assert answer.status_code in (400, 401)


async def test_administrators_routes_need_an_administrator(guarded):
    assert (await guarded.http.get("/metrics", headers=bearer("ann"))).status_code == 403
    text = (await guarded.http.get("/metrics", headers=bearer("root"))).text
    assert 'tandem_gateway_authentication_failures_total{reason="forbidden"} 1.0' in text
    assert "tandem_gateway_api_key_tenants 9.0" in text


async def test_keys_are_in_no_log_no_metric_and_no_answer(guarded, caplog):
    caplog.set_level(logging.DEBUG)
    secrets = [key_of("ann"), "sk-unknown-but-secret"]
    answers = [(await ask(guarded, "ann")).text]
    answers += [(await guarded.http.post("/v1/x", headers={"Authorization": f"Bearer {secrets[1]}"})).text]
    answers += [(await guarded.http.get("/metrics", headers=bearer("root"))).text]
    output = " ".join([*answers, *(f"{record.getMessage()} {vars(record)}" for record in caplog.records)])
    assert not [secret for secret in secrets if secret in output]
    assert "'tenant': 'ann'" in output


# What they see


async def test_key_without_a_right_on_a_model_gets_404_for_it(guarded):
    assert (await guarded.http.get("/v1/models", headers=bearer("other"))).json()["data"] == []
    card = await guarded.http.get("/v1/models/mock", headers=bearer("other"))
    bodies = {
        "/v1/chat/completions": CHAT,
        "/v1/responses": RESPONSE,
        "/v1/completions": {"model": "mock", "prompt": "hi"},
        "/v1/embeddings": {"model": "mock", "input": "hi"},
        "/tokenize": {"model": "mock", "prompt": "hi"},
        "/detokenize": {"model": "mock", "tokens": [5]},
    }
    answers = [card]
    for path, body in bodies.items():
        answers.append(await ask(guarded, "other", path, body))
    for answer in answers:
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "model_not_found"


@as_chat_and_response
async def test_explain_is_limited_to_requests_of_the_tenant(guarded, path, body):
    answer = await guarded.http.post(path, json=body, headers={**bearer("ann"), "X-Request-Id": "mine"})
    for known in (answer.json()["id"], "mine"):
        explained = f"/v1/requests/{known}/explain"
        assert (await guarded.http.get(explained, headers=bearer("bob"))).status_code == 404
        assert (await guarded.http.get(explained, headers=bearer("ann"))).json()["tenant"] == "ann"


# Caches and sessions


async def salts(guarded, rack, *asks: tuple[str, str | None]) -> list[str]:
    for tenant, salt in asks:
        assert (await ask(guarded, tenant, cache_salt=salt)).status_code == 200
    return [request.cache_salt for request in rack.engines[0].received[-len(asks) :]]


async def test_tenants_share_no_prefixes_unless_they_say_so(guarded, rack):  # [tenants-apart]
    ann, again, bob, one, two = await salts(
        guarded, rack, ("ann", None), ("ann", None), ("bob", None), ("pool-a", None), ("pool-b", None)
    )
    assert ann == again != bob
    assert (one, two) == ("", "")
    assert "" not in (ann, bob)


async def test_clients_salt_adds_to_that_of_its_tenant(guarded, rack):
    own, mine, bobs, shared, theirs = await salts(
        guarded, rack, ("ann", None), ("ann", "x"), ("bob", "x"), ("pool-a", "x"), ("pool-b", "x")
    )
    assert len({own, mine, bobs, shared}) == 4
    assert shared == theirs
    # Nor can a tenant of a shared pool name the salt of another tenant.
    assert await salts(guarded, rack, ("pool-a", own)) != [own]


async def test_router_sees_the_same_salt_as_the_worker(guarded, rack):
    [salt] = await salts(guarded, rack, ("ann", None))
    assert guarded.chooser.queries[-1].cache_salt == salt


async def test_response_has_the_salt_of_the_chat_that_means_the_same(guarded, rack):
    chat, mine = await salts(guarded, rack, ("ann", None), ("ann", "x"))
    for salt in (None, "x"):
        assert (await ask(guarded, "ann", "/v1/responses", RESPONSE, cache_salt=salt)).status_code == 200
    assert [request.cache_salt for request in rack.engines[0].received[-2:]] == [chat, mine]


async def test_sessions_with_one_id_are_one_for_each_tenant(guarded):
    for tenant in ("ann", "bob"):
        opened = await guarded.http.post("/v1/sessions", json={"session_id": "s"}, headers=bearer(tenant))
        assert opened.status_code == 200
        assert (await guarded.http.post("/v1/completions", json=SESSION, headers=bearer(tenant))).status_code == 200
    assert len(guarded.sessions.bindings) == 2
    for _ in range(2):
        await guarded.http.delete("/v1/sessions/s", headers=bearer("bob"))
    assert len(guarded.sessions.bindings) == 1


@as_chat_and_response
async def test_request_is_no_more_important_than_its_tenant(guarded, rack, path, body):
    for tenant, wanted in (("ann", 99), ("ann", -3), ("bob", 99), ("bob", 2), ("bob", None)):
        await ask(guarded, tenant, path, body, priority=wanted)
    assert [request.priority for request in rack.engines[0].received] == [0, -3, 5, 2, 0]


# How much


@as_chat_and_response
async def test_rate_limit_headers_report_remaining_and_retry_after(guarded, path, body):
    answers = [await ask(guarded, "rpm", path, body) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    left = [answer.headers["x-ratelimit-remaining-requests"] for answer in answers]
    assert (left, answers[0].headers["x-ratelimit-limit-requests"]) == (["1", "0", "0"], "2")
    refused = answers[2]
    assert re.fullmatch(r"1m\ds|\d+s", refused.headers["x-ratelimit-reset-requests"])
    assert 0 < int(refused.headers["retry-after"]) <= 61
    error = refused.json()["error"]
    assert (error["code"], error["type"]) == ("rate_limit_exceeded", "RateLimitError")
    assert "requests per min (RPM): Limit 2, Used 2, Requested 1" in error["message"]
    assert "x-ratelimit-limit-tokens" not in refused.headers


async def test_requests_that_fail_count_too_and_reading_does_not(guarded):
    for _ in range(5):
        assert (await guarded.http.get("/v1/models", headers=bearer("rpm"))).status_code == 200
    assert (await guarded.http.post("/v1/completions", content=b"{", headers=bearer("rpm"))).status_code == 400
    assert (await guarded.http.post("/nope", headers=bearer("rpm"))).status_code == 404
    assert (await ask(guarded, "rpm")).status_code == 429


async def test_tokens_are_counted_as_they_were_used(guarded, rack):
    rack.engines[0].behavior.eos = None
    first = await guarded.http.post(
        "/v1/completions", json={"model": "mock", "prompt": [5] * 30, "max_tokens": 60}, headers=bearer("tpm")
    )
    assert first.status_code == 200
    assert first.headers["x-ratelimit-remaining-tokens"] == "10"
    small = {"model": "mock", "prompt": [5] * 10, "max_tokens": 1}
    refused = await guarded.http.post("/v1/completions", json=small, headers=bearer("tpm"))
    assert refused.status_code == 429
    assert "tokens per min (TPM): Limit 100, Used 90, Requested 11" in refused.json()["error"]["message"]
    assert "retry-after" in refused.headers


async def test_tokens_of_a_response_are_counted_as_they_were_used(guarded, rack):
    rack.engines[0].behavior.eos = None
    answer = await ask(guarded, "tpm", "/v1/responses", RESPONSE, max_output_tokens=40)
    used = answer.json()["usage"]["total_tokens"]
    assert used > 40
    later = await ask(guarded, "tpm", "/v1/responses", RESPONSE, max_output_tokens=60)
    assert later.status_code == 429
    assert f"Limit 100, Used {used}" in later.json()["error"]["message"]


async def test_tokens_that_were_expected_and_not_used_are_given_back(guarded, rack):
    rack.engines[0].behavior.token = lambda *_: EOS
    body = {"model": "mock", "prompt": [5] * 10, "max_tokens": 80}
    for used in (0, 11, 22):
        answer = await guarded.http.post("/v1/completions", json=body, headers=bearer("tpm"))
        if used < 11:
            assert answer.status_code == 200
            assert answer.headers["x-ratelimit-remaining-tokens"] == "10"
    body["max_tokens"] = 60
    answer = await guarded.http.post("/v1/completions", json=body, headers=bearer("tpm"))
    assert answer.status_code == 200, answer.text


async def test_request_above_the_limit_has_no_retry_after(guarded):
    body = {"model": "mock", "prompt": [5] * 101, "max_tokens": 1}
    refused = await guarded.http.post("/v1/completions", json=body, headers=bearer("tpm"))
    assert refused.status_code == 429
    assert "Request too large" in refused.json()["error"]["message"]
    assert "retry-after" not in refused.headers


@as_chat_and_response
async def test_concurrency_limit_is_released_at_end_or_disconnect(guarded, rack, path, body):
    rack.engines[0].behavior.mute = True
    running = asyncio.ensure_future(ask(guarded, "single", path, body))
    await asyncio.to_thread(rack.engines[0].wait_until, lambda: len(rack.engines[0].received) == 1)
    refused = await ask(guarded, "single", path, body)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert (await guarded.http.get("/v1/models", headers=bearer("single"))).status_code == 200
    running.cancel()
    await asyncio.to_thread(rack.engines[0].wait_until, lambda: bool(rack.engines[0].aborted))
    rack.engines[0].behavior.mute = False
    assert (await ask(guarded, "single")).status_code == 200


async def test_limits_hold_without_failures_while_redis_is_away(rack, tokenizer, keys):
    rack.add("solo", MockBehavior(token=hash_tokens(3, 250), eos=EOS))
    config = {"api_keys": keys, "usage": DeadBoard(), "fairness": DeadBoard()}
    async with live_gateway(rack.context, tokenizer, rack.engines, **config) as gateway:
        assert [(await ask(gateway, "rpm")).status_code for _ in range(3)] == [200, 200, 429]
        assert (await ask(gateway, "single")).status_code == 200
        assert (await ask(gateway, "single")).status_code == 200
        text = (await gateway.http.get("/metrics", headers=bearer("root"))).text
    assert "tandem_gateway_limits_local_total 5.0" in text
    assert 'tandem_gateway_requests_limited_total{limit="requests",tenant="rpm"} 1.0' in text


@as_chat_and_response
async def test_request_without_capacity_waits(guarded, rack, path, body):
    guarded.chooser.room = 0
    waiting = asyncio.ensure_future(ask(guarded, "ann", path, body))
    await until(lambda: _waits(guarded), 60.0, "it waits")
    assert not rack.engines[0].received
    guarded.chooser.room = 1
    assert (await waiting).status_code == 200


async def _waits(gateway) -> bool:
    text = (await gateway.http.get("/metrics", headers=bearer("root"))).text
    return '\ntandem_gateway_num_requests_waiting{model_name="mock"} 1.0' in text


# Without keys


async def test_gateway_without_key_file_allows_everything(gateway, rack):
    answer = await gateway.chat(max_tokens=1, cache_salt="mine", priority=7)
    assert answer.status_code == 200
    assert (rack.engines[0].received[0].cache_salt, rack.engines[0].received[0].priority) == ("mine", 7)
    assert (await gateway.http.get("/metrics", headers={"Authorization": "Bearer any"})).status_code == 200
    assert not [name for name in answer.headers if name.startswith("x-ratelimit")]


# Deadlines


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon", ""])
async def test_timeout_that_is_no_duration_is_refused(gateway, value):
    answer = await gateway.http.post("/v1/chat/completions", json=CHAT, headers={"X-Request-Timeout": value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "X-Request-Timeout"


@as_chat_and_response
@pytest.mark.parametrize(("headers", "fields"), [({"X-Request-Timeout": "0.2"}, {}), ({}, {"timeout": 0.2})])
async def test_client_may_have_less_time_than_the_gateway_gives(gateway, rack, headers, fields, path, body):
    rack.engines[0].behavior.mute = True
    answer = await gateway.http.post(path, json={**body, **fields}, headers=headers)
    assert answer.status_code == 504
    assert gateway.chooser.open == 0
