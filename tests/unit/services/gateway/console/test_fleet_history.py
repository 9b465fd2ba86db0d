"""The hour that the console remembers: what a sample is, how many there are, and when there are none."""

import asyncio

import pytest

from tandem_services.common.health import Health
from tandem_services.gateway.console import fleet_history
from tandem_services.gateway.console.fleet_document import GatewayFigures, ViewedFleet, fleet_document
from tandem_services.gateway.console.fleet_history import KEPT_S, MAX_SAMPLES, PERIOD_S, FleetHistory
from tandem_services.gateway.http.sse import encode_json
from tandem_services.gateway.observe.explain import RequestJournal
from tandem_testing.console_builders import ScriptedFleet, member
from tandem_testing.service_clock import ServiceClock


class Recording:
    """A history whose time passes by `pass_time`."""

    def __init__(self, monkeypatch, *members) -> None:
        self.fleet = ScriptedFleet(members=list(members))
        self.clock = ServiceClock()
        figures = GatewayFigures(
            health=Health(),
            running=lambda: 2,
            waiting=lambda: 1,
            journal=RequestJournal(4),
            latency=tuple,
            uptime_s=lambda: 7.0,
            requires_key=False,
        )
        self.history = FleetHistory(
            look=lambda: fleet_document([ViewedFleet("blue", self.fleet)], figures), clock=self.clock
        )
        self.planned: list = []
        monkeypatch.setattr(fleet_history.asyncio, "get_running_loop", lambda: self)

    def call_later(self, delay_s: float, callback) -> object:
        assert delay_s == PERIOD_S
        self.planned.append(callback)
        return callback

    def pass_time(self, samples: int = 1) -> None:
        for _ in range(samples):
            self.clock.advance(PERIOD_S)
            for callback in [self.planned.pop() for _ in [*self.planned]]:
                callback()


def test_nothing_is_recorded_without_viewers(monkeypatch):
    recording = Recording(monkeypatch, member("w1"))
    recording.pass_time(3)
    assert recording.fleet.asked == 0
    assert recording.history.document().samples == []


def test_sample_sums_workers_and_rates_since_the_last_one(monkeypatch):
    recording = Recording(monkeypatch, member("w1"), member("w2"))
    recording.history.viewed()
    grown = {"prompt_tokens_total": "1100", "cached_tokens_total": "625", "transfer_bytes_total": "50001000"}
    recording.fleet.members[:] = [member("w1", figures=grown), member("new")]
    recording.pass_time()
    first, second = recording.history.document().samples
    assert (first.running, first.queued, first.output, first.kv) == (8, 3, 425.0, 0.35)
    assert (first.hits, first.moved) == (None, 0.0)
    assert (second.hits, second.moved) == (0.25, 1000 / PERIOD_S)


def test_fleet_history_keeps_one_hour_of_samples(monkeypatch):
    recording = Recording(monkeypatch, member("w1"))
    for _ in range(MAX_SAMPLES + 50):
        recording.history.viewed()
        recording.pass_time()
    samples = recording.history.document().samples
    assert len(samples) == MAX_SAMPLES
    assert len(encode_json(recording.history.document())) < 200_000


def test_recording_ends_an_hour_after_the_last_look(monkeypatch):
    recording = Recording(monkeypatch, member("w1"))
    recording.history.viewed()
    recording.pass_time(int(KEPT_S / PERIOD_S))
    assert recording.history.document().samples
    recording.pass_time()
    assert (recording.history.document().samples, recording.planned) == ([], [])
    recording.history.viewed()
    assert len(recording.history.document().samples) == 1


@pytest.mark.parametrize("looks", [1, 5])
async def test_looks_plan_one_sample_at_a_time(looks: int):
    fleet, clock = ScriptedFleet(members=[member("w1")]), ServiceClock()
    figures = GatewayFigures(
        health=Health(),
        running=lambda: 0,
        waiting=lambda: 0,
        journal=RequestJournal(4),
        latency=tuple,
        uptime_s=lambda: 7.0,
        requires_key=False,
    )
    history = FleetHistory(look=lambda: fleet_document([ViewedFleet("blue", fleet)], figures), clock=clock)
    for _ in range(looks):
        history.viewed()
        await asyncio.sleep(0)
    assert fleet.asked == 1
