"""`tandem bench serve`: what it asks of a server, and what it says of one that refuses."""

import json

import httpx
import pytest

from tandem_services.cli.main import main


@pytest.fixture
def served(monkeypatch):
    """A server that answers every completion with two tokens; its bodies, in order."""
    bodies: list[dict] = []
    status = {"/v1/models": 200}

    def answer(request: httpx.Request) -> httpx.Response:
        if status["/v1/models"] != 200:
            return httpx.Response(401, json={"error": {"message": "Incorrect API key provided."}})
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        bodies.append(json.loads(request.content))
        tokens = [{"id": "c", "choices": [{"index": 0, "text": text, "finish_reason": end}]} for text, end in TOKENS]
        usage = {"id": "c", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}}
        return httpx.Response(200, text="".join(f"data: {json.dumps(e)}\n\n" for e in [*tokens, usage]) + DONE)

    def client(_, url: str) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url=url)

    monkeypatch.setattr("tandem_lab.cli.bench._client", client)
    return bodies, status


TOKENS = [("a", None), ("b", "length")]
DONE = "data: [DONE]\n\n"
RUN = ["bench", "serve", "--num-prompts", "3", "--output-len", "2", "--json"]


def test_references_leave_the_prefix_cache_of_the_run_cold(served, capsys) -> None:
    """Every prompt of a run was in the prefix cache, where its reference had left it."""
    bodies, _ = served
    assert main(RUN) == 0
    salts = [body.get("cache_salt") for body in bodies]
    assert len(set(salts[:3])) == 1
    assert salts[0]
    assert salts[3:] == [None, None, None]
    assert json.loads(capsys.readouterr().out)["checked"] == 3


def test_another_server_s_cache_needs_no_salt(served) -> None:
    bodies, _ = served
    assert main([*RUN, "--reference-url", "http://other"]) == 0
    assert [body.get("cache_salt") for body in bodies] == [None] * 6


def test_bench_reports_error_message_of_the_server(served, capsys) -> None:
    served[1]["/v1/models"] = 401
    assert main(RUN) == 3
    assert capsys.readouterr().err.strip().endswith("http://127.0.0.1:8000: Incorrect API key provided.")


def test_objectives_without_a_bound_are_refused_before_any_request(served, capsys) -> None:
    assert main([*RUN, "--send-slo"]) == 2
    assert "--send-slo: needs --slo-ttft-ms or --slo-itl-ms" in capsys.readouterr().err
    assert served[0] == []
