"""Whatever a request says in the shapes that a gateway decodes, it is served or refused by name: never a 5xx.

`python -m tandem_testing.request_fuzz` asks a hundred thousand of the same requests [request-never-kills].
"""

import asyncio

import pytest

from tandem_testing.random_bodies import SHAPES
from tandem_testing.request_fuzz import GROWTH_MIB, FuzzedGateway, fuzz, fuzzed_gateway

EACH = 80
"""Requests of each endpoint."""


@pytest.fixture(scope="module")
def runner():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def gateway(runner, tmp_path_factory):
    """One that lives as long as the module."""
    living = fuzzed_gateway(tmp_path_factory.mktemp("tokenizer"))
    yield runner.run(living.__aenter__())
    runner.run(living.__aexit__(None, None, None))


@pytest.mark.parametrize("path", SHAPES)
def test_schema_valid_request_is_served_or_rejected_by_name(runner, gateway, path):
    tally = runner.run(fuzz(gateway, range(EACH), 0, (path,)))
    assert tally.problems == []
    assert sum(tally.statuses.values()) == EACH
    assert tally.statuses[path, 200] > EACH // 10, "hardly anything was served"
    assert sum(count for (_, status), count in tally.statuses.items() if status == 400) > EACH // 10
    assert tally.grown_mib < GROWTH_MIB


@pytest.mark.parametrize("path", SHAPES)
def test_sound_request_is_served(runner, gateway: FuzzedGateway, path):
    assert runner.run(gateway.ask(path, SHAPES[path][1])).status_code == 200
