"""Fleets that a gateway opens while it serves, on a real Redis."""

from dataclasses import replace

import pytest

from tandem_engine.base.errors import CheckpointError, ConfigError
from tandem_services.common.redis_client import RedisAddress, RedisUnavailableError
from tandem_services.gateway import fleets as gateway_fleets
from tandem_services.gateway.config import ModelConfig
from tandem_services.gateway.fleets import OpenFleets
from tandem_testing.router_builders import Fleet, make_record
from tandem_testing.tokenizer_builders import write_tokenizer


@pytest.fixture
def model(server, tmp_path) -> ModelConfig:
    return ModelConfig(
        path=write_tokenizer(tmp_path), names=("mini",), cluster="live", redis=RedisAddress(url=server.url)
    )


async def test_opened_fleet_lists_its_workers_and_is_closed_once(server, model):
    async with Fleet.of(server, cluster="live") as workers:
        await workers.beat(make_record("w"))
        fleets = OpenFleets()
        one, other = await fleets.open(model), await fleets.open(model)
        assert [worker.worker_id for worker in one.router.workers()] == ["w"]
        assert one.view.cluster == "live"
        await fleets.close(one)
        assert [worker.worker_id for worker in other.router.workers()] == ["w"]
        await fleets.close_all()
        await fleets.close_all()


async def test_fleet_that_cannot_open_reports_the_reason(model, monkeypatch):
    monkeypatch.setattr(gateway_fleets, "LATER_START_S", 0.0)
    away = RedisAddress(url="redis://127.0.0.1:1/0")
    fleets = OpenFleets()
    for changes, error in (
        ({"redis": away}, RedisUnavailableError),
        ({"path": model.path / "nowhere"}, CheckpointError),
        ({"curve_keys": model.path / "none.json"}, ConfigError),
    ):
        with pytest.raises(error):
            await fleets.open(replace(model, **changes))
    await fleets.close_all()
