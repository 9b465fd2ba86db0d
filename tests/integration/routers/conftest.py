"""Routers on a real Redis, which the workers that they choose from have reported to."""

import pytest

from tandem_testing.router_builders import LASTING, Fleet, patient_router


@pytest.fixture
async def fleet(server):
    async with Fleet.of(server, **LASTING) as workers:
        yield workers


@pytest.fixture
async def router(server):
    gateway = patient_router(server)
    await gateway.start()
    yield gateway
    await gateway.stop()
