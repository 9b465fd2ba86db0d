"""A worker may die after any token of any request: the client gets the same output [resume-from-tokens]."""

import asyncio
import json
from collections import defaultdict
from typing import Any

import pytest

from tandem_engine.config import Role
from tandem_testing.gateway_builders import EngineRack, LiveGateway, live_gateway
from tandem_testing.healthy_engines import TOKEN, healthy
from tandem_testing.loop_time import set_forward_until
from tandem_testing.mock_engine import MockBehavior
from tandem_testing.tokenizer_builders import EOS

LENGTH = 10
PROMPT = [7, 8, 9, 40]


def received_by_client(response) -> dict[str, Any]:
    """What a client knows in the end: per choice all text, all logprobs and every finish; usage."""
    lines = response.text.split("\n\n") if "event-stream" in response.headers["content-type"] else [response.text]
    documents = [json.loads(text) for line in lines if (text := line.removeprefix("data: ")) not in ("", "[DONE]")]
    assert not any("error" in document for document in documents), documents[-1]
    choices: dict[int, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for choice in (choice for document in documents for choice in document["choices"]):
        gathered = choices[choice["index"]]
        delta = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
        gathered["text"].append(delta.get("content") or "")
        gathered["role"] += [delta["role"]] if "role" in delta else []
        gathered["finish"] += [choice["finish_reason"]] if choice["finish_reason"] else []
        gathered["prompt"] += choice.get("prompt_logprobs") or []
        gathered["ids"] += choice.get("token_ids") or []
        gathered["prompt ids"] += [choice["prompt_token_ids"]] if "prompt_token_ids" in choice else []
        for name, values in (choice["logprobs"] or {}).items():
            gathered[name] += values or []
    for gathered in choices.values():
        gathered["text"] = ["".join(gathered["text"])]
    usages = [document["usage"] for document in documents if document.get("usage")]
    return {"choices": {index: dict(choice) for index, choice in choices.items()}, "usage": usages[-1:]}


Ask = dict[str, Any]
STREAM: Ask = {"stream": True, "stream_options": {"include_usage": True}}
KINDS: dict[str, Ask] = {
    "whole": {},
    "stream": STREAM,
    "continuous usage": {"stream": True, "stream_options": {"continuous_usage_stats": True, "include_usage": True}},
    "logprobs": {"logprobs": 2},
    "logprobs streamed": {"logprobs": 2, **STREAM},
    "echo": {"echo": True, "logprobs": 1},
    "echo streamed": {"echo": True, "logprobs": 1, **STREAM},
    "prompt logprobs": {"prompt_logprobs": 2},
    "token ids": {"return_token_ids": True},
    "token ids streamed": {"return_token_ids": True, "return_tokens_as_token_ids": True, "logprobs": 1, **STREAM},
    "named logprobs": {"logprobs": 0, "logprob_token_ids": [9, 5]},
    "intervals": {"stream_interval": 3, "return_token_ids": True, "logprobs": 1, **STREAM},
    "n": {"n": 3, "logprobs": 1},
    "n streamed": {"n": 3, "logprobs": 1, **STREAM},
    "best_of": {"n": 2, "best_of": 4},
    "several prompts": {"prompt": [PROMPT, [5, 6]], **STREAM},
}


class Reaper:
    """Sends the same request again and again, each time to a worker that dies a token later."""

    def __init__(self, rack: EngineRack, gateway: LiveGateway, *, pair: bool) -> None:
        self._rack, self._gateway, self._pair = rack, gateway, pair
        self._others = [rack.add("survivor", healthy(), Role.DECODE if pair else Role.BOTH)]
        if pair:
            self._others.append(rack.add("prefill", healthy(), Role.PREFILL))
        self._deaths = 0

    async def answer(self, ask: Ask, *, die_after: int | None = None) -> dict[str, Any]:
        self._gateway.chooser.fleet = [engine.view for engine in self._others]
        if die_after is not None:
            self._deaths += 1
            role = Role.DECODE if self._pair else Role.BOTH
            victim = self._rack.add(f"victim-{self._deaths}", healthy(die_after=die_after), role)
            self._gateway.chooser.fleet.insert(0, victim.view)
        path = "/v1/chat/completions" if "messages" in ask else "/v1/completions"
        body = {"model": "mock", "max_tokens": LENGTH, "seed": 5, **({} if "messages" in ask else {"prompt": PROMPT})}
        answer = await self._gateway.http.post(path, json={**body, **ask})
        assert answer.status_code == 200, answer.text
        if die_after is not None:
            assert victim.received
        return received_by_client(answer)


@pytest.fixture(params=[False, True], ids=["alone", "pair"])
async def reaper(request, rack, tokenizer):
    # A busy machine starves the threads of mock engines: only a closed socket is a death here.
    async with live_gateway(rack.context, tokenizer, []) as gateway:
        yield Reaper(rack, gateway, pair=request.param)


async def assert_unbroken(reaper: Reaper, ask: Ask, *, tokens: int) -> None:
    undisturbed = await reaper.answer(ask)
    assert undisturbed["choices"][0]["finish"]
    for position in range(tokens):
        assert await reaper.answer(ask, die_after=position) == undisturbed, f"died after {position} tokens"


@pytest.mark.parametrize("kind", KINDS)
async def test_output_is_unchanged_by_worker_exit_after_any_token(reaper, kind):
    await assert_unbroken(reaper, KINDS[kind], tokens=LENGTH)


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_says_its_role_once_and_its_logprobs_unbroken(reaper, stream):
    chat = {"messages": [{"role": "user", "content": "hello"}], "logprobs": True, "top_logprobs": 2, "stream": stream}
    await assert_unbroken(reaper, chat, tokens=LENGTH)


@pytest.mark.parametrize("kept", [False, True])
async def test_stop_string_that_straddles_the_break_is_found(reaper, kept):  # [stop-strings]
    text = (await reaper.answer({"max_tokens": 40}))["choices"][0]["text"][0]
    stop = text[len(text) // 2 - 3 : len(text) // 2 + 4]
    ask = {"max_tokens": 40, "stop": [stop], "include_stop_str_in_output": kept, **STREAM}
    whole = await reaper.answer(ask)
    [written] = whole["choices"][0]["text"]
    assert (whole["choices"][0]["finish"], written.endswith(stop)) == (["stop"], kept)
    tokens = whole["usage"][0]["completion_tokens"]
    assert 4 < tokens < 40
    await assert_unbroken(reaper, ask, tokens=tokens)


async def test_without_a_seed_the_one_that_was_drawn_is_kept(rack, tokenizer):
    first, second = rack.add("first", healthy(die_after=4)), rack.add("second", healthy())
    async with live_gateway(rack.context, tokenizer, rack.engines) as gateway:
        assert (await gateway.complete(max_tokens=9, temperature=1.0)).status_code == 200
    [original], [resumed] = first.received, second.received
    assert original.sampling.seed is not None
    assert resumed.sampling == original.sampling


async def test_members_of_a_group_that_have_ended_are_not_sent_again(rack, tokenizer):
    """Only what the dead worker still owed goes elsewhere."""
    dying = rack.add("dying", MockBehavior(token=_first_ends_early, eos=EOS, mute=True))
    survivor = rack.add("survivor", MockBehavior(token=_first_ends_early, eos=EOS))
    async with live_gateway(rack.context, tokenizer, rack.engines) as gateway:
        answering = asyncio.ensure_future(gateway.complete(max_tokens=8, n=3, seed=0))
        assert await asyncio.to_thread(dying.wait_until, lambda: len(dying.received) == 3)
        dying.behavior.die_after = 9
        dying.behavior.mute = False
        answer = (await answering).json()
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "length", "length"]
    assert {request.sampling.seed for request in survivor.received} == {1, 2}


def _first_ends_early(request, position: int) -> int:
    return EOS if request.sampling.seed == 0 and position == 1 else TOKEN(request, position)


async def test_tokens_of_an_older_attempt_are_ignored(rack, tokenizer):  # [position-once] [zombie-fenced]
    """A worker that was taken for dead wakes up and says what it had left to say."""
    zombie = rack.add("zombie", healthy(mute=True))
    replacement = rack.add("replacement", healthy(step_s=0.01))
    async with live_gateway(rack.context, tokenizer, rack.engines, ping_interval_s=2.0) as gateway:
        answering = asyncio.ensure_future(gateway.complete(max_tokens=40, seed=1))
        assert await asyncio.to_thread(zombie.wait_until, lambda: bool(zombie.received))
        zombie.behavior.deaf = True
        await set_forward_until(lambda: gateway.chooser.dead == {"zombie@1"}, step_s=2.0, steps=6)
        assert await asyncio.to_thread(replacement.wait_until, lambda: bool(replacement.received))
        zombie.behavior.deaf = zombie.behavior.mute = False
        answer = (await answering).json()
    ids = [TOKEN(replacement.received[0], position) for position in range(40)]
    assert answer["usage"]["completion_tokens"] == 40
    assert answer["choices"][0]["text"] == tokenizer.decode(ids)
