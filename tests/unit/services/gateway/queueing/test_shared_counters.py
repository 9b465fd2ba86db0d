"""Counters between gateways: reported, taken over, and kept while Redis is away."""

from dataclasses import dataclass, field

from tandem_services.common.redis_client import RedisUnavailableError, UnreadableReplyError
from tandem_services.gateway.queueing.fair_queue import SharedCounters
from tandem_services.router.shared_state import Charge, Report, Standing
from tandem_services.router.usage_counters import VirtualCounters


@dataclass
class Sheet:
    """Adds up, as Redis does."""

    totals: dict[str, float] = field(default_factory=dict)
    reachable: bool = True
    readable: bool = True
    reports: list[list[Charge]] = field(default_factory=list)
    charged_in_between: "SharedCounters | None" = None

    async def sync(self, report: Report) -> Standing:
        if not self.reachable:
            raise RedisUnavailableError("no answer")
        self.reports.append(list(report.charges))
        for charge in report.charges:
            self.totals[charge.tenant] = self.totals.get(charge.tenant, 0.0) + charge.cost
        if self.charged_in_between is not None:
            self.charged_in_between.charge("a", 7)
        if not self.readable:
            raise UnreadableReplyError("no such shape")
        return Standing(values={c.tenant: self.totals[c.tenant] for c in report.charges}, floor=0.0)


def gateway(sheet: Sheet) -> SharedCounters:
    shared = SharedCounters(counters=VirtualCounters(), board=sheet)
    shared.counters.arrive("a")
    return shared


async def test_gateways_learn_what_others_have_charged():
    sheet = Sheet()
    one, two = gateway(sheet), gateway(sheet)
    one.charge("a", 100)
    two.charge("a", 50)
    for each in (one, two, one):
        await each.sync()
    assert (one.counters.value("a"), two.counters.value("a")) == (150, 150)


async def test_charges_during_a_report_are_kept():
    sheet = Sheet()
    shared = gateway(sheet)
    shared.charge("a", 100)
    sheet.charged_in_between = shared
    await shared.sync()
    assert shared.counters.value("a") == 107
    sheet.charged_in_between = None
    await shared.sync()
    assert (sheet.totals["a"], shared.counters.value("a")) == (107, 107)


async def test_counters_without_redis_are_local_and_reported_later():
    sheet = Sheet(reachable=False)
    shared = gateway(sheet)
    for _ in range(3):
        shared.charge("a", 100)
        await shared.sync()
    assert shared.counters.value("a") == 300
    sheet.reachable = True
    await shared.sync()
    assert sheet.totals == {"a": 300}


async def test_unreadable_counter_reply_is_not_charged_again():
    """It was taken for Redis away, and what Redis had added up was added to it each time again."""
    sheet = Sheet(readable=False)
    shared = gateway(sheet)
    shared.charge("a", 100)
    for _ in range(3):
        assert await shared.sync() is None
    assert (sheet.totals, shared.counters.value("a")) == ({"a": 100}, 100)


async def test_end_of_waiting_is_reported_once():
    sheet = Sheet()
    shared = gateway(sheet)
    await shared.sync()
    shared.counters.leave("a")
    for _ in range(3):
        await shared.sync()
    assert [[charge.waits for charge in report] for report in sheet.reports] == [[True], [False]]


async def test_without_a_board_nothing_is_kept_for_a_report():
    shared = SharedCounters(counters=VirtualCounters())
    shared.charge("a", 5)
    await shared.sync()
    assert not shared._pending
