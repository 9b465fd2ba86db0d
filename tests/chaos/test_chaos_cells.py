"""A cell that dies with its Redis, as real processes: two cells, streams compared token by token (scenario 76)."""

import pytest

from tandem_testing.chaos.runner import Runner
from tandem_testing.chaos.scenario import Result, Scale
from tandem_testing.chaos.suite import scenarios
from tandem_testing.redis_server import REDIS_SERVER

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("chaos"),
    pytest.mark.skipif(REDIS_SERVER is None, reason="redis-server is not installed"),
]

PATIENCE_S = 10.0


async def test_requests_of_a_dead_cell_resume_in_another_and_return(tmp_path):
    async with Runner(folder=tmp_path, scale=Scale(streams=12, tokens=200), slack_s=PATIENCE_S) as runner:
        outcome = await runner.run(scenarios()[76])
    assert outcome.problems == ()
    assert not outcome.damage
    assert outcome.result is Result.KEPT
    assert outcome.requests > 40
