"""Requests made up from the OpenAPI document: served, or refused in OpenAI's shape, and answered as the document says.

schemathesis makes requests that fit the document, and ones that do not at some place that it names. Hardly any would be
served, for want of a model and a prompt that there are: these are put in. The gateway that gets what does not fit is
strict, since its document allows less.
"""

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import jsonschema_rs
import msgspec
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.specs.openapi import checks

from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_services.gateway.api.openapi.document import Traits, openapi_document
from tandem_testing.gateway_builders import EngineRack, LiveGateway, live_gateway
from tandem_testing.mock_engine import MockBehavior, hash_tokens
from tandem_testing.openapi_contract import Contract
from tandem_testing.tokenizer_builders import EOS, TOOL_CHATML, write_tokenizer

LENIENT = openapi_document(Traits(strict_fields=False, keys=False, metrics=True))
STRICT = openapi_document(Traits(strict_fields=True, keys=False, metrics=True))
CHECKS = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]
SOUND: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "mock", "messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"model": "mock", "prompt": "hi"},
    "/v1/responses": {"model": "mock", "input": "hi"},
    "/v1/messages": {"model": "mock", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
    "/v1/messages/count_tokens": {"model": "mock", "messages": [{"role": "user", "content": "hi"}]},
    "/v1/embeddings": {"model": "mock", "input": "hi"},
    "/tokenize": {"model": "mock"},
    "/detokenize": {"model": "mock"},
}
PLAIN: dict[str, dict[str, Any]] = {
    "/tokenize": {"model": "mock", "prompt": "hi"},
    "/detokenize": {"model": "mock", "tokens": [5]},
}
"""What is asked besides where a request is sound by one of several fields, or by few ids: few made-up ones are."""
FIXED = {"/v1/models", "/live", "/ready", "/health", "/version", "/openapi.json", "/metrics"}
"""These take no input."""
CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
ARE = [(method.upper(), path) for path, methods in LENIENT["paths"].items() for method in methods]
ASKED = [(method, path) for method, path in ARE if path not in FIXED]
WITH_BODY = [(method, path) for method, path in ASKED if "requestBody" in LENIENT["paths"][path][method.lower()]]
NOT_ALL_READ = "/v1/messages/count_tokens"
"""Its summary says so."""


@dataclass
class Judge:
    """A gateway that lives as long as the module, and what its document says."""

    gateway: LiveGateway
    runner: asyncio.Runner
    document: dict[str, Any]

    def __post_init__(self) -> None:
        self.schema = schemathesis.openapi.from_dict(self.document)
        self.contract = Contract(self.document)

    def cases(self, method: str, path: str, mode: GenerationMode) -> st.SearchStrategy[Case]:
        return self.schema[path][method].as_strategy(generation_mode=mode)

    def fits(self, method: str, path: str, answer: httpx.Response) -> bool:
        """Whether what was sent is JSON of the shape that the document asks for."""
        try:
            body = msgspec.json.decode(answer.request.content)
        except msgspec.DecodeError:
            return False
        schema = self.contract.operation(method, path)["requestBody"]["content"]["application/json"]["schema"]
        components = self.document["components"]
        return jsonschema_rs.validator_for({**schema, "components": components}).is_valid(body)

    def exchange(self, case: Case) -> httpx.Response:
        """Send it, and hold the answer to the document."""
        asked = requests.Request(**case.as_transport_kwargs(base_url=self.gateway.url)).prepare()
        sending = self.gateway.http.request(
            str(asked.method), str(asked.url), headers=[*asked.headers.items()], content=asked.body
        )
        answer = self.runner.run(sending)
        case.validate_response(answer, checks=CHECKS)
        media = answer.headers.get("content-type", "")
        if media.startswith("text/event-stream"):
            self._check_events(case, answer)
        elif answer.content:
            body = answer.json() if media == "application/json" else answer.text
            self.contract.check(case.method, case.operation.path, answer.status_code, media, body)
        if answer.status_code >= 400 and case.path not in FIXED:
            check_refusal(case, answer)
        return answer

    def _check_events(self, case: Case, answer: httpx.Response) -> None:
        documents = [json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: {")]
        assert documents
        self.contract.check_events(case.method, case.operation.path, documents)


def check_refusal(case: Case, answer: httpx.Response) -> None:
    error = answer.json()["error"]
    assert not CONTROLS.search(error["message"])
    waits = isinstance(case.body, dict) and case.body.get("timeout") is not None
    in_time = waits or any(name.lower() == "x-request-timeout" for name in case.headers or {})
    # A request that allows no time gets none.
    assert answer.status_code < 500 or (answer.status_code == 504 and in_time), error


@pytest.fixture(scope="module")
def rack_and_tokenizer(tmp_path_factory):
    folder = write_tokenizer(tmp_path_factory.mktemp("tokenizer"), chat_template=TOOL_CHATML)
    with EngineRack() as rack:
        engine = rack.add("solo", MockBehavior(token=hash_tokens(3, 250), eos=EOS, tokens_per_output=8))
        engine.context_length = 96
        yield rack, TextTokenizer.load(folder)


@contextmanager
def judge(rack: EngineRack, tokenizer: TextTokenizer, document: dict[str, Any], **config: Any) -> Iterator[Judge]:
    with asyncio.Runner() as runner:
        living = live_gateway(rack.context, tokenizer, rack.engines, **config)
        yield Judge(runner.run(living.__aenter__()), runner, document)
        runner.run(living.__aexit__(None, None, None))


@pytest.fixture(scope="module")
def lenient(rack_and_tokenizer):
    with judge(*rack_and_tokenizer, LENIENT) as judging:
        yield judging


@pytest.fixture(scope="module")
def strict(rack_and_tokenizer):
    with judge(*rack_and_tokenizer, STRICT, strict_fields=True) as judging:
        yield judging


def examples(count: int) -> settings:
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[*HealthCheck],
    )


@pytest.mark.parametrize(("method", "path"), ASKED)
def test_valid_requests_get_documented_responses(lenient, method, path):
    statuses = set()

    @examples(20 if path in SOUND else 8)
    @given(data=st.data())
    def ask(data):
        case = data.draw(lenient.cases(method, path, GenerationMode.POSITIVE))
        if path in SOUND:
            case.body = {**case.body, **SOUND[path]}
        statuses.add(lenient.exchange(case).status_code)

    ask()
    if path in PLAIN:
        statuses.add(lenient.runner.run(lenient.gateway.http.post(path, json=PLAIN[path])).status_code)
    if path in SOUND:
        assert 200 in statuses


@pytest.mark.parametrize(("method", "path"), WITH_BODY)
def test_invalid_requests_are_rejected(strict, method, path):
    refused = 0

    @examples(20 if path in SOUND else 8)
    @given(data=st.data())
    def ask(data):
        nonlocal refused
        case = data.draw(strict.cases(method, path, GenerationMode.NEGATIVE))
        if isinstance(case.body, dict):
            case.body = {**case.body, **SOUND.get(path, {})}
        answer = strict.exchange(case)
        if not strict.fits(method, path, answer) and (path != NOT_ALL_READ or answer.status_code != 200):
            assert 400 <= answer.status_code < 500, (answer.request.content, answer.text)
            refused += 1

    ask()
    assert refused


@pytest.mark.parametrize(("method", "path"), [each for each in ARE if each not in ASKED])
def test_routes_without_input_answer_200(lenient, method, path):
    assert lenient.exchange(lenient.schema[path][method].Case()).status_code == 200
