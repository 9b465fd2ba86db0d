"""Conversations on whole systems: only new turns are sent, the answers are those to the whole history."""

from typing import Any

import pytest

from tandem_testing.system_client import SystemClient

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("system")]

TURNS = ("{about}. " + "Once upon a time there was a fox who lived near a river. " * 12, "One day he met", " and then")


async def post(client: SystemClient, path: str, **body: Any) -> dict[str, Any]:
    response = await client.http.post(path, json={"model": client.model, "temperature": 0, "max_tokens": 12, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def assert_continues(client: SystemClient, reference: SystemClient, about: str) -> list[dict[str, Any]]:
    """Three turns of one session on `client`; returns its answers. No worker has anything `about` that cached."""
    answers, history = [], []
    session_id = (await client.http.post("/v1/sessions", json={})).json()["id"]
    for text in TURNS:
        turn = [*await client.tokens(text.format(about=about))]
        params = {"session_params": {"id": session_id, "turn": len(answers)}, "ignore_eos": True}
        answers.append(await post(client, "/v1/completions", prompt=turn, **params))
        history += turn
        whole = await post(reference, "/v1/completions", prompt=history, ignore_eos=True, logprobs=0)
        assert answers[-1]["choices"][0]["text"] == whole["choices"][0]["text"]
        assert answers[-1]["usage"]["prompt_tokens"] == len(history)
        history += await output_tokens(reference, whole)
    assert (await client.http.delete(f"/v1/sessions/{session_id}")).status_code == 200
    return answers


async def output_tokens(client: SystemClient, answer: dict[str, Any]) -> list[int]:
    """Ids of a completion's tokens, by what each is spelled like."""
    spelled = answer["choices"][0]["logprobs"]["tokens"]
    ids = [await client.tokens(token) for token in spelled]
    assert all(len(each) == 1 for each in ids), f"{spelled} are not all tokens"
    return [token for each in ids for token in each]


async def test_worker_that_does_both_continues_a_session(systems):
    async with SystemClient(system=systems[1]) as both:
        answers = await assert_continues(both, both, "Alone")
    assert answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"] >= 100


async def test_session_after_handoff_stays_on_decode_worker(fleet, systems):
    async with SystemClient(system=systems[1]) as reference:
        answers = await assert_continues(fleet, reference, "Handed over")
    [first], [second], [third] = [await fleet.attempts(answer["id"]) for answer in answers]
    assert first["prefill"].startswith("prefill-")
    assert {second["prefill"], third["prefill"]} == {None}
    assert first["decode"] == second["decode"] == third["decode"]


async def test_chat_continues_by_its_new_message(systems):
    opening = {"role": "user", "content": "Tell me a story about a fox who lives near a river."}
    follow_up = {"role": "user", "content": "And then?"}
    async with SystemClient(system=systems[1]) as both:
        path, session = "/v1/chat/completions", {"id": "chat", "turn": 0}
        first = await post(both, path, messages=[opening], session_params=session)
        second = await post(both, path, messages=[follow_up], session_params={"id": "chat"})
        answer = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
        whole = await post(both, path, messages=[opening, answer, follow_up])
    assert second["choices"][0]["message"]["content"] == whole["choices"][0]["message"]["content"]
    assert second["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
