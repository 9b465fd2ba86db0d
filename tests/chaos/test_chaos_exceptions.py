"""A few exceptions in functions of engines and of their services; `make chaos` raises in many (72, 73)."""

from dataclasses import replace

import pytest

from tandem_testing.chaos.fleet import Shape
from tandem_testing.chaos.runner import Runner
from tandem_testing.chaos.scenario import Result, Scale
from tandem_testing.chaos.suite import scenarios
from tandem_testing.redis_server import REDIS_SERVER

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long("each function of a service and of an engine raises in tests of one process"),
    pytest.mark.timeout(600),
    pytest.mark.xdist_group("chaos"),
    pytest.mark.skipif(REDIS_SERVER is None, reason="redis-server is not installed"),
]

FEW = Scale(exceptions=2)
SMALL = Shape(prefill=0, decode=0, both=2, gateways=1, raising=True)
PATIENCE_S = 5.0
"""As in the other tests here. `make chaos` measures without it."""


async def test_exceptions_in_engines_and_services_change_no_answer(tmp_path) -> None:
    async with Runner(folder=tmp_path, scale=FEW, slack_s=PATIENCE_S, seed=1) as runner:
        for number in (72, 73):
            outcome = await runner.run(replace(scenarios()[number], shape=SMALL))
            assert outcome.problems == ()
            assert not outcome.damage
            assert outcome.result is Result.KEPT
            assert outcome.requests > 0
