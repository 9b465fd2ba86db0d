"""Every log record about a request names it, and its trace when it belongs to one."""

import pytest

from tandem_engine.messages.outputs import Finish, FinishReason
from tandem_testing.gateway_builders import live_gateway
from tandem_testing.mock_engine import MockBehavior, hash_tokens

TRACE = "c" * 32
HEADERS = {"traceparent": f"00-{TRACE}-{'d' * 16}-01"}
FAULT = Finish(reason=FinishReason.ERROR, error="step raised", code="engine_error", retryable=True)


def fields_of(caplog, message: str) -> dict:
    (record,) = [record for record in caplog.records if record.message == message]
    return record.fields


@pytest.mark.parametrize("headers", [{}, HEADERS])
async def test_last_line_of_a_request(rack, tokenizer, caplog, headers):
    caplog.set_level("INFO")
    rack.add("solo", MockBehavior(token=hash_tokens(3, 250)))
    async with live_gateway(rack.context, tokenizer, rack.engines) as gateway:
        gateway.http.headers.update(headers)
        answer = await gateway.complete(max_tokens=2)
    fields = fields_of(caplog, "request finished")
    assert fields["request_id"] == answer.headers["x-request-id"]
    assert fields["trace_id"] == (TRACE if headers else None)


async def test_attempt_that_fails_and_an_answer_that_breaks(rack, tokenizer, caplog, monkeypatch):
    rack.add("first", MockBehavior(token=hash_tokens(3, 250), fail_after=(2, FAULT)))
    rack.add("second", MockBehavior(token=hash_tokens(3, 250)))
    async with live_gateway(rack.context, tokenizer, rack.engines) as gateway:
        gateway.http.headers.update(HEADERS)
        answer = await gateway.complete(max_tokens=4, ignore_eos=True)

        def boom(*_: object) -> None:
            raise RuntimeError("a bug")

        monkeypatch.setattr("tandem_services.gateway.api.response_writer.new_record", boom)
        broken = await gateway.complete(max_tokens=2)
    expected = {"request_id": answer.headers["x-request-id"], "trace_id": TRACE, "choice": 0}
    assert fields_of(caplog, "attempt failed").items() >= expected.items()
    expected = {"request_id": broken.headers["x-request-id"], "trace_id": TRACE}
    assert fields_of(caplog, "request failed unexpectedly") == expected
