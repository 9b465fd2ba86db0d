"""A path or method that is not served is answered with what was asked, and with the usual mistake corrected."""

import pytest


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("/chat/completions", "POST /chat/completions is not served: did you mean /v1/chat/completions?"),
        ("/v1/v1/messages", "POST /v1/v1/messages is not served: did you mean /v1/messages?"),
        ("/v1/moderations", "POST /v1/moderations is not served"),
        ("/v1/%1b[31m", "POST /v1/\\x1b[31m is not served"),
    ],
)
async def test_unknown_path_returns_404_suggesting_the_right_path(gateway, path, sentence):
    answer = await gateway.http.post(path, json={})
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == sentence


async def test_wrong_method_is_answered_405_with_the_right_one(gateway):
    answer = await gateway.http.get("/v1/chat/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["error"]["message"] == "GET /v1/chat/completions is not served: use POST"
