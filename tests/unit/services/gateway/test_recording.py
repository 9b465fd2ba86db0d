"""An error in what only records or estimates: the answer is complete and the same [recording-ends-nothing].

Each function of the modules that record raises once while requests are answered (`tandem_testing.raised_anywhere`).
"""

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

import tandem_services.gateway
from tandem_services.common.recording import errors
from tandem_testing.gateway_builders import LiveGateway
from tandem_testing.metric_text import metric_sum
from tandem_testing.raised_anywhere import Fault, name_of, raising, recorded

FOLDER = Path(tandem_services.gateway.__file__).parent
MODULES = ("observe/explain.py", "observe/metrics.py", "observe/predictions.py", "observe/tracing.py")
CLASSES = ("QueueMetrics.", "SloAdmission.")
"""Of modules that also serve."""
EMPTY = "PassedOn.received"
"""Does nothing, once per token."""

USAGE = ("used_tokens", "output_tokens", "cached_tokens", "reasoning_tokens")
"""Of a `RequestRecord`, what the answer says and a tenant's limit is charged with: an error must not hide it."""

BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": "hi", "logprobs": 1}),
    "completions": ("/v1/completions", {"prompt": ["hi", "ho"], "stream": True}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "n": 2}),
    "chat stream": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "stream": True}),
    "objectives": ("/v1/completions", {"prompt": "hi", "slo": {"ttft_ms": 1e6}}),
}
VARYING = re.compile(r'"(id|created)":("[^"]*"|\d+)')


async def answer(gateway: LiveGateway, name: str) -> tuple[int, list[str]]:
    """Status and events, in any order: those of several choices come in any."""
    path, body = BODIES[name]
    response = await gateway.http.post(path, json={"model": "mock", "max_tokens": 4, "seed": 1, **body})
    return response.status_code, sorted(VARYING.sub("", response.text).split("\n\n"))


def only_records(code: CodeType) -> bool:
    if code.co_qualname.startswith(tuple(f"RequestRecord.{name}" for name in USAGE)):
        return False
    if code.co_qualname == EMPTY:
        return False
    path = Path(code.co_filename).relative_to(FOLDER).as_posix()
    return path in MODULES or code.co_qualname.startswith(CLASSES)


@pytest.fixture
def unlogged() -> Iterator[None]:
    """Records of errors would keep tracebacks until the end of all tests."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("unlogged")
async def test_error_in_a_record_or_estimate_changes_no_answer(gateway):  # [recording-ends-nothing]
    expected, functions = {}, {}
    for name in BODIES:
        await answer(gateway, name)
        with recorded(FOLDER) as seen:
            expected[name] = await answer(gateway, name)
        functions |= {code: name for code in seen if only_records(code)}
    assert all(status == 200 for status, _ in expected.values()), expected
    assert len(functions) >= 25, [name_of(code) for code in functions]
    before, fell, wrong = sum(errors().values()), 0, []
    for code, name in functions.items():
        with raising(Fault(code=code)) as planted:
            got = await answer(gateway, name)
        fell += planted.fell
        if got != expected[name]:
            wrong.append(f"{name_of(code)}, {name}: {json.dumps(got)[:200]}")
    assert not wrong, "\n".join(wrong)
    assert fell >= 25
    metrics = (await gateway.http.get("/metrics")).text
    own = metric_sum(metrics, "tandem_gateway_prediction_errors_total")
    assert sum(errors().values()) - before + own == fell, "each error is counted once"
    assert metric_sum(metrics, "tandem_gateway_recording_errors_total") == sum(errors().values())
