"""A fleet whose processes, Redis included, listen on an IPv6 address alone keeps what it promises."""

import pytest

from tandem_testing.chaos.runner import Runner
from tandem_testing.chaos.scenario import Result, Scale
from tandem_testing.chaos.suite import scenarios
from tandem_testing.long_tests import long_except
from tandem_testing.redis_server import REDIS_SERVER

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("chaos"),
    pytest.mark.skipif(REDIS_SERVER is None, reason="redis-server is not installed"),
]

PATIENCE_S = 5.0
KILLED_DECODE, KILLED_PREFILL = 1, 6
WHY = "addresses of a killed prefill worker are those of a killed decode worker"


@pytest.mark.parametrize("number", long_except((KILLED_DECODE, KILLED_PREFILL), {KILLED_DECODE}, why=WHY))
async def test_ipv6_fleet_keeps_its_promises(number, tmp_path):
    scale = Scale(streams=8, tokens=128)
    async with Runner(folder=tmp_path, scale=scale, slack_s=PATIENCE_S, host="::1") as runner:
        outcome = await runner.run(scenarios()[number])
    assert outcome.problems == ()
    assert not outcome.damage
    assert outcome.result is Result.KEPT
    assert outcome.requests > 0
