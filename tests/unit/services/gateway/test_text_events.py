"""Events whose text alone changes are the bytes that encoding each of them would give."""

import pytest

from tandem_services.gateway.http.sse import TextEvents, data_event, encode_json

TEXTS = ["a", "", '"', "\\", "\0", "\n", "\u2028", "é\U0001f389", "</script>", '"text":"', "\x7f"]
MODELS = ["mock", "\0", '"\\u0000"', '","choices":[{"text":"']
"""What stands before the text may be anything that a client makes up."""


@pytest.mark.parametrize("model", MODELS)
def test_only_the_text_differs(model):
    def encode(choice: int, text: str) -> bytes:
        choices = [{"index": choice, "text": text, "logprobs": None, "finish_reason": None}]
        return data_event(encode_json({"id": "cmpl-0", "model": model, "choices": choices}))

    events = TextEvents(encode)
    for choice in (0, 7, 0):
        assert [events.of(choice, text) for text in TEXTS] == [encode(choice, text) for text in TEXTS]


def test_event_without_its_text_is_a_mistake():
    with pytest.raises(AssertionError, match="does not have its text"):
        TextEvents(lambda choice, _: b"data: %d\n\n" % choice).of(0, "a")
