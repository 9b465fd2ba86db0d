"""The scenarios of `make chaos` that matter most and take seconds, with less load."""

import pytest
import pytest_asyncio

from tandem_testing.chaos.runner import Outcome, Runner
from tandem_testing.chaos.scenario import Result, Scale
from tandem_testing.chaos.suite import scenarios
from tandem_testing.long_tests import long_except
from tandem_testing.redis_server import REDIS_SERVER

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("chaos"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(REDIS_SERVER is None, reason="redis-server is not installed"),
]

PATIENCE_S = 5.0
"""Far less than what a worker that is gone is fenced after. `make chaos` measures without it."""

QUICK = {number: scenario for number, scenario in scenarios().items() if scenario.quick}
EACH_CHANGE = {0, 1, 6, 16, 27}
WHY = "a killed service and a restarted prefill worker lose what killed engines and prefill workers lose"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def runner(tmp_path_factory):
    """One fleet and one reference for all of them."""
    folder = tmp_path_factory.mktemp("chaos")
    async with Runner(folder=folder, scale=Scale(streams=16, tokens=256), slack_s=PATIENCE_S) as running:
        yield running


@pytest.mark.parametrize(
    "number", long_except(QUICK, EACH_CHANGE, why=WHY), ids=[each.promise.title for each in QUICK.values()]
)
async def test_quick_scenario_keeps_its_promise(runner, number):
    outcome: Outcome = await runner.run(QUICK[number])
    assert outcome.problems == ()
    assert not outcome.damage
    assert outcome.result is Result.KEPT
    assert outcome.requests > 0
