"""stream_interval: the first token at once, then so many together, the last as soon as they are there."""

import pytest

from tandem_engine.messages.outputs import Finish, FinishReason
from tandem_engine.messages.sampling import SamplingParams
from tandem_services.gateway.output.choice_text import ChoicePiece, ChoiceText
from tandem_services.gateway.output.token_sequence import Accepted
from tandem_testing.gateway_builders import events, live_gateway
from tandem_testing.mock_engine import MockBehavior, hash_tokens
from tandem_testing.tokenizer_builders import EOS
from tandem_testing.waiting import until

TOKEN = hash_tokens(3, 250)
TEXT = "the quick brown fox jumps over the lazy dog"


def pieces(tokenizer, interval: int, *, stop: tuple[str, ...] = (), at_once: int = 1) -> list[ChoicePiece]:
    ids = tokenizer.encode(TEXT)
    sampling = SamplingParams(max_tokens=len(ids), stop=stop)
    text = ChoiceText(
        0,
        tokenizer.vocabulary,
        sampling,
        skip_special_tokens=True,
        keep_stop=False,
        returns_ids=True,
        interval=interval,
    )
    made = []
    for begin in range(0, len(ids), at_once):
        new = ids[begin : begin + at_once]
        finish = Finish(reason=FinishReason.LENGTH) if begin + at_once >= len(ids) else None
        piece = text.absorb(Accepted(new, [], finish))
        made += [] if piece is None else [piece]
        if piece is not None and piece.finish is not None:
            break
    return made


@pytest.mark.parametrize(("interval", "at_once"), [(1, 1), (3, 1), (4, 3), (100, 1)])
def test_tokens_come_in_the_intervals_that_were_asked_for(tokenizer, interval, at_once):
    made = pieces(tokenizer, interval, at_once=at_once)
    sizes = [len(piece.token_ids) for piece in made]
    assert sizes[0] == at_once, "the first comes at once"
    assert all(interval <= size < interval + at_once for size in sizes[1:-1])
    assert "".join(piece.text for piece in made) == TEXT
    assert [token for piece in made for token in piece.token_ids] == tokenizer.encode(TEXT)
    assert made[-1].finish is not None
    assert not any(piece.finish for piece in made[:-1])


def test_stop_string_does_not_wait_for_its_interval(tokenizer):
    made = pieces(tokenizer, 100, stop=("fox",))
    assert [piece.finish and piece.finish.reason for piece in made] == [None, "stop"]
    assert "".join(piece.text for piece in made) == TEXT[: TEXT.index("fox")]


@pytest.mark.parametrize("ask", ["chat", "complete"])
async def test_stream_in_intervals_says_what_one_without_says(gateway, ask):
    fields = {"max_tokens": 20, "seed": 1, "n": 2, "stream": True, "stream_options": {"include_usage": True}}

    async def answered(**more):
        chunks = events(await getattr(gateway, ask)(**fields, **more))
        texts = ["", ""]
        for choice in (choice for chunk in chunks for choice in chunk["choices"]):
            texts[choice["index"]] += (choice.get("delta") or {}).get("content") or choice.get("text") or ""
        return texts, chunks[-1]["usage"]["completion_tokens"]

    assert await answered(stream_interval=7) == await answered()


async def test_unwritten_tokens_count_before_client_disconnects(rack, tokenizer):
    rack.add("solo", MockBehavior(token=TOKEN, eos=EOS, step_s=0.05))
    async with live_gateway(rack.context, tokenizer, rack.engines) as gateway:
        body = {"model": "mock", "prompt": "hi", "max_tokens": 400, "stream": True, "stream_interval": 399}
        async with gateway.http.stream("POST", "/v1/completions", json=body) as answer:
            path = f"/v1/requests/{answer.headers['x-request-id']}/explain"

            async def counted() -> bool:
                record = (await gateway.http.get(path)).json()
                return record["status"] is None and record["choices"][0]["output_tokens"] > 5

            await until(counted, 30.0, "tokens that are held back are not counted")


async def test_answers_that_are_not_streamed_have_no_intervals(gateway):
    answer = await gateway.complete(max_tokens=5, stream_interval=100)
    assert answer.json()["usage"]["completion_tokens"] == 5
