"""Text becomes ids, and ids text, in threads, in bounded numbers, for requests that still wait; brief text on the
loop."""

import asyncio
import json
import threading
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import Tokenizer, normalizers

from tandem_engine.tokenizer import text_tokenizer
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_services.common.errors import ApiError, bad_request
from tandem_services.gateway.api import logprobs
from tandem_services.gateway.limits import BRIEF_TEXT_CHARACTERS, SHORT_TEXT_CHARACTERS
from tandem_services.gateway.models import tokenizer_threads
from tandem_services.gateway.models.tokenizer_threads import TokenizerThreads
from tandem_testing.gateway_builders import live_gateway
from tandem_testing.mock_engine import MockBehavior, hash_tokens
from tandem_testing.tokenizer_builders import EOS, write_tokenizer
from tandem_testing.waiting import until

LONG = SHORT_TEXT_CHARACTERS + 1
PATIENCE_S = 60.0

MESSAGES = [{"role": "user", "content": "hello"}]
REQUESTS = {
    "chat": ("/v1/chat/completions", {"model": "mock", "messages": MESSAGES, "max_tokens": 1}),
    "completion": ("/v1/completions", {"model": "mock", "prompt": ["hello", "you"], "max_tokens": 1}),
    "echo": ("/v1/completions", {"model": "mock", "prompt": [5, 6], "max_tokens": 1, "echo": True}),
    "bad words": ("/v1/completions", {"model": "mock", "prompt": [5], "max_tokens": 1, "bad_words": ["no"]}),
    "response": ("/v1/responses", {"model": "mock", "input": "hello", "max_output_tokens": 1}),
    "message": ("/v1/messages", {"model": "mock", "messages": MESSAGES, "max_tokens": 1}),
    "count": ("/v1/messages/count_tokens", {"model": "mock", "messages": MESSAGES}),
    "embedding": ("/v1/embeddings", {"model": "mock", "input": ["hello", "you"]}),
    "tokenize": ("/tokenize", {"prompt": "hello"}),
    "tokenize messages": ("/tokenize", {"messages": MESSAGES}),
    "detokenize": ("/detokenize", {"tokens": [5, 6]}),
}


class Gate:
    """Work that takes until it is let through."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.open = threading.Event()

    def __call__(self) -> str:
        self.entered.set()
        assert self.open.wait(PATIENCE_S)
        return "through"

    async def reached(self) -> None:
        assert await asyncio.to_thread(self.entered.wait, PATIENCE_S)


@pytest.fixture
def threads():
    made = TokenizerThreads(long_threads=1, most_jobs=8, most_characters=4 * LONG)
    yield made
    made.close()


@pytest.fixture
def tokenizing_in(monkeypatch) -> list[bool]:
    """For each use of a tokenizer whether an event loop ran in its thread."""
    seen: list[bool] = []

    def watched(work):
        def watch(*args, **kwargs):
            seen.append(asyncio._get_running_loop() is not None)
            return work(*args, **kwargs)

        return watch

    monkeypatch.setattr(text_tokenizer, "_encode", watched(text_tokenizer._encode))
    monkeypatch.setattr(TextTokenizer, "decode", watched(TextTokenizer.decode))
    return seen


@pytest.fixture
def nothing_brief(monkeypatch):
    """Every text is for the threads."""
    monkeypatch.setattr(tokenizer_threads, "BRIEF_TEXT_CHARACTERS", 0)


@pytest.mark.usefixtures("nothing_brief")
@pytest.mark.parametrize("name", REQUESTS)
async def test_no_request_is_tokenized_on_the_event_loop(gateway, tokenizing_in, name):
    path, body = REQUESTS[name]
    answer = await gateway.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert tokenizing_in
    assert not any(tokenizing_in)


SCORED = {
    "completion": ("/v1/completions", {"prompt": "hello", "prompt_logprobs": 2}),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, "prompt_logprobs": 2}),
    "echo": ("/v1/completions", {"prompt": "hello", "echo": True, "logprobs": 2}),
    "streamed echo": ("/v1/completions", {"prompt": "hello", "echo": True, "logprobs": 2, "stream": True}),
}


@pytest.mark.parametrize("name", SCORED)
async def test_no_prompts_logprobs_are_written_on_the_event_loop(gateway, monkeypatch, name):
    seen = []
    for function in ("echoed_logprobs", "prompt_logprobs"):
        write = getattr(logprobs, function)

        def watched(*args, write=write):
            seen.append(asyncio._get_running_loop() is not None)
            return write(*args)

        monkeypatch.setattr(logprobs, function, watched)
    path, body = SCORED[name]
    answer = await gateway.http.post(path, json={"model": "mock", "max_tokens": 2, **body})
    assert answer.status_code == 200, answer.text
    assert seen
    assert not any(seen)


async def test_unrejectable_text_is_computed_despite_a_full_queue(threads):
    gate = Gate()
    tasks = [asyncio.create_task(threads.run(gate, characters=LONG)) for _ in range(4)]
    await gate.reached()
    answer = asyncio.create_task(threads.run(lambda: "answer", characters=LONG, refusable=False))
    await asyncio.sleep(0)  # it has asked
    gate.open.set()
    assert await answer == "answer"
    await asyncio.gather(*tasks)


async def test_thread_error_is_raised_in_the_caller(threads):
    def refused():
        raise bad_request("no such word", "bad_words")

    with pytest.raises(ApiError, match="no such word"):
        await threads.run(refused, characters=1)
    assert (threads.jobs, threads.characters) == (0, 0)


BRIEF = "hello " * 80
LONGER = "hello " * 90
CALLS = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": LONGER})}}]
ON_THE_LOOP = {
    "chat": ({"messages": MESSAGES}, True),
    "variables": ({"messages": MESSAGES, "chat_template_kwargs": {"a": 1}}, False),
    "brief text": ({"prompt": BRIEF}, True),
    "longer text": ({"prompt": LONGER}, False),
    "brief texts, longer together": ({"messages": [*MESSAGES, {"role": "user", "content": LONGER}]}, False),
    "many messages": ({"messages": [{"role": "user", "content": ""}] * 40}, False),
    "texts": ({"input": ["a", "b"]}, True),
    "many texts": ({"input": ["a"] * 40}, False),
    "reasoning": ({"messages": [{"role": "assistant", "content": "", "reasoning": LONGER}, *MESSAGES]}, False),
    "calls": ({"messages": [{"role": "assistant", "tool_calls": CALLS}, *MESSAGES]}, False),
}


@pytest.mark.parametrize("name", ON_THE_LOOP)
async def test_brief_text_alone_is_tokenized_on_the_loop(gateway, tokenizing_in, monkeypatch, name):
    # However slow the machine is.
    monkeypatch.setattr(tokenizer_threads, "BRIEF_TEXTS_S", PATIENCE_S)
    body, expected = ON_THE_LOOP[name]
    paths = {"messages": "/v1/chat/completions", "prompt": "/v1/completions", "input": "/v1/embeddings"}
    answer = await gateway.http.post(paths[next(iter(body))], json={"model": "mock", **body})
    assert answer.status_code == 200, answer.text
    assert tokenizing_in
    assert set(tokenizing_in) == {expected}


def normalizing(folder: Path, normalizer: normalizers.Normalizer) -> TextTokenizer:
    file = write_tokenizer(folder) / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.normalizer = normalizer
    tokenizer.save(str(file))
    return TextTokenizer.load(folder)


HARD = ("\ufdfa", "\U0010ffff", "\u0300", "\ufb2d", "\u1faf", "\ud7a3", "\U0001f468\u200d", "\u00bd", " ", "\n")
"""Characters of many bytes, that combine, or that normalizers write as many."""


@pytest.mark.parametrize("form", [None, "NFC", "NFD", "NFKC", "NFKD"])
def test_brief_hard_text_becomes_few_tokens_or_is_told_apart(tokenizer, tmp_path, form):
    """A token takes the tokenizer a fifth of a microsecond, so nine for each of 512 characters a millisecond."""
    used = tokenizer if form is None else normalizing(tmp_path, getattr(normalizers, form)())
    counts = [len(used.encode((hard * BRIEF_TEXT_CHARACTERS)[:BRIEF_TEXT_CHARACTERS])) for hard in HARD]
    assert used.expands_text == (max(counts) > 9 * BRIEF_TEXT_CHARACTERS) == (form in ("NFKC", "NFKD"))


@pytest.mark.parametrize(("text", "expected"), [("hello", True), ("\ufdfa", False)])
async def test_text_that_a_normalizer_expands_is_for_the_threads(rack, tmp_path, tokenizing_in, text, expected):
    rack.add("solo", MockBehavior(token=hash_tokens(3, 250), eos=EOS))
    expanding = normalizing(tmp_path, normalizers.NFKC())
    async with live_gateway(rack.context, expanding, rack.engines) as gateway:
        tokenizing_in.clear()
        answers = [await gateway.complete(text, max_tokens=1), await gateway.chat(text, max_tokens=1)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert set(tokenizing_in) == {expected}


async def test_brief_work_beyond_its_time_waits_in_order(threads, monkeypatch):
    """In the loop, which serves others between."""
    monkeypatch.setattr(tokenizer_threads, "BRIEF_TEXTS_S", 1e-9)
    done: list[int] = []

    def work(number: int) -> int:
        done.append(number)
        return threading.get_ident()

    asked = [
        asyncio.create_task(threads.run(partial(work, number), characters=1, brief=True))
        for number in range(threads.most_jobs)
    ]
    seen = [len(done)]
    while len(done) < len(asked):
        await asyncio.sleep(0)
        seen.append(len(done))
    assert {await each for each in asked} == {threading.get_ident()}
    assert done == [*range(len(asked))]
    assert max(after - before for before, after in pairwise(seen)) <= 2, "others had their turns"
    assert threads.jobs == 0


async def test_turns_that_fail_leave_no_brief_work_waiting(threads, monkeypatch):
    monkeypatch.setattr(tokenizer_threads, "BRIEF_TEXTS_S", 1e-9)
    give = threads._give_turns
    failures = [RuntimeError("a defect")] * 2

    def failing() -> None:
        if failures:
            raise failures.pop()
        give()

    monkeypatch.setattr(threads, "_give_turns", failing)
    asked = [asyncio.create_task(threads.run(threading.get_ident, characters=1, brief=True)) for _ in range(3)]
    async with asyncio.timeout(PATIENCE_S):
        assert await asyncio.gather(*asked) == [threading.get_ident()] * 3
    assert not failures


async def test_brief_work_of_a_client_that_left_is_not_done(threads, monkeypatch):
    monkeypatch.setattr(tokenizer_threads, "BRIEF_TEXTS_S", 1e-9)
    done: list[int] = []
    first, left, last = (
        asyncio.create_task(threads.run(partial(done.append, number), characters=1, brief=True)) for number in range(3)
    )
    await first
    left.cancel()
    await last
    assert done == [0, 2]
    assert threads.jobs == 0


async def test_brief_work_beyond_all_that_may_wait_is_refused(threads, monkeypatch):
    monkeypatch.setattr(tokenizer_threads, "BRIEF_TEXTS_S", 1e-9)
    asked = [
        asyncio.create_task(threads.run(threading.get_ident, characters=1, brief=True))
        for _ in range(threads.most_jobs + 2)
    ]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    assert [isinstance(answer, ApiError) for answer in answers] == [False] * (threads.most_jobs + 1) + [True]


@pytest.mark.parametrize("brief", [False, True])
async def test_panic_of_a_tokenizer_ends_only_its_request(gateway, monkeypatch, brief):
    """A panic of the tokenizer's Rust code is no `Exception`."""
    monkeypatch.setattr(tokenizer_threads, "BRIEF_TEXT_CHARACTERS", 512 if brief else 0)

    class PanicException(BaseException):  # pyo3's name
        pass

    def broken(*_, **__):
        raise PanicException("/secret/path")

    with monkeypatch.context() as patch:
        patch.setattr(text_tokenizer, "_encode", broken)
        answer = await gateway.complete("hello")
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert answer.json()["error"]["type"] == "InternalServerError"
    assert (await gateway.complete("hello")).status_code == 200


@pytest.mark.usefixtures("nothing_brief")
async def test_fault_in_a_thread_is_an_error_of_openais_shape(gateway, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("/secret/path")

    monkeypatch.setattr(text_tokenizer, "_encode", broken)
    answer = await gateway.complete("hello")
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "InternalServerError"
    assert "secret" not in answer.text


async def test_short_text_does_not_wait_behind_a_long_one(threads):
    long = Gate()
    waiting = asyncio.create_task(threads.run(long, characters=LONG))
    await long.reached()
    assert await threads.run(lambda: "short", characters=1) == "short"
    long.open.set()
    assert await waiting == "through"


async def test_texts_that_arrive_while_busy_are_answered_together(threads, monkeypatch):
    together: list[int] = []
    deliver = tokenizer_threads._deliver

    def counted(jobs):
        together.append(len(jobs))
        deliver(jobs)

    monkeypatch.setattr(tokenizer_threads, "_deliver", counted)
    first = Gate()
    tasks = [asyncio.create_task(threads.run(first, characters=1))]
    await first.reached()
    tasks += [asyncio.create_task(threads.run(lambda n=n: n, characters=1)) for n in range(5)]
    await asyncio.sleep(0)  # they have asked
    assert threads.jobs == 6
    first.open.set()
    assert await asyncio.gather(*tasks) == ["through", 0, 1, 2, 3, 4]
    assert together == [1, 5]


@pytest.mark.parametrize("characters", [1, LONG])
async def test_cancelled_tokenizer_job_is_not_run(threads, characters):
    gate, done = Gate(), []
    busy = asyncio.create_task(threads.run(gate, characters=characters))
    await gate.reached()
    left = asyncio.create_task(threads.run(lambda: done.append("left"), characters=characters))
    kept = asyncio.create_task(threads.run(lambda: done.append("kept"), characters=characters))
    await asyncio.sleep(0)  # they have asked
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    assert (threads.jobs, threads.characters) == (2, 2 * characters)
    gate.open.set()
    await asyncio.gather(busy, kept)
    assert done == ["kept"]


async def test_disconnect_during_encoding_leaves_no_state(threads):
    gate = Gate()
    left = asyncio.create_task(threads.run(gate, characters=LONG))
    await gate.reached()
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    assert threads.jobs == 0
    gate.open.set()
    assert await threads.run(lambda: "next", characters=LONG) == "next"


@pytest.mark.parametrize(("waiting", "characters"), [(8, 1), (3, LONG + 2)])
async def test_too_much_that_waits_is_refused(threads, waiting, characters):
    gate = Gate()
    tasks = [asyncio.create_task(threads.run(gate, characters=characters)) for _ in range(waiting)]
    await gate.reached()
    with pytest.raises(ApiError) as refused:
        await threads.run(lambda: "too late", characters=characters)
    assert (refused.value.status, refused.value.retry_after) == (503, tokenizer_threads.RETRY_S)
    gate.open.set()
    await asyncio.gather(*tasks)
    assert await threads.run(lambda: "room", characters=characters) == "room"


async def test_single_long_text_is_not_refused_for_its_length(threads):
    assert await threads.run(lambda: "taken", characters=100 * LONG) == "taken"


@pytest.fixture
def slow_tokenizer(monkeypatch, nothing_brief):
    """Nothing is encoded before the gate opens."""
    gate, encode = Gate(), text_tokenizer._encode

    def gated(*args, **kwargs):
        gate()
        return encode(*args, **kwargs)

    monkeypatch.setattr(text_tokenizer, "_encode", gated)
    yield gate
    gate.open.set()


@pytest.mark.parametrize("name", ["chat", "embedding", "tokenize", "count"])
async def test_deadline_holds_while_text_is_encoded(gateway, slow_tokenizer, name):
    path, body = REQUESTS[name]
    answer = await gateway.http.post(path, json=body, headers={"X-Request-Timeout": "0.05"})
    assert answer.status_code == 504
    slow_tokenizer.open.set()
    assert (await gateway.http.post(path, json=body)).status_code == 200


@pytest.mark.parametrize("name", ["chat", "embedding", "tokenize", "count"])
async def test_client_may_leave_while_text_is_encoded(gateway, slow_tokenizer, name):
    path, body = REQUESTS[name]
    leaving = asyncio.create_task(gateway.http.post(path, json=body))
    await slow_tokenizer.reached()
    leaving.cancel()
    counted = 'tandem_gateway_client_disconnects_total{model_name="mock"} 1.0'

    async def noticed() -> bool:
        return counted in (await gateway.http.get("/metrics")).text

    await until(noticed, PATIENCE_S, "that the client has left is noticed")
