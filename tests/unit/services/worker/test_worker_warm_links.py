"""A worker is ready once its first links were tested, once and for all, and in any case after a while."""

import pytest

from tandem_engine.messages.requests import Peer
from tandem_engine.messages.stats import LinkReport
from tandem_services.worker.peers import WarmLinks
from tandem_testing.service_clock import ServiceClock


def peer(name: str) -> Peer:
    return Peer(worker_id=name, incarnation=f"{name}@1", endpoint="tcp://h:1", compat_hash="c")


class Worker:
    def __init__(self, timeout_s: float = 20.0) -> None:
        self.peers: tuple[Peer, ...] | None = None
        self.reports: tuple[LinkReport, ...] = ()
        self.clock = ServiceClock()
        self.warm = WarmLinks(
            clock=self.clock, timeout_s=timeout_s, named=lambda: self.peers, links=lambda: self.reports
        )


def test_worker_is_not_ready_before_its_peers_are_known():
    worker = Worker()
    assert worker.warm.check() == "not introduced to its peers yet"
    worker.peers = ()
    assert worker.warm.check() is None, "nobody is there"


@pytest.mark.parametrize("report", [{"bytes_per_s": 1e9}, {"problem": "no answer"}, {"broken": True}])
def test_tested_link_counts_with_any_result(report):
    worker = Worker()
    worker.peers = (peer("p0"), peer("p1"))
    assert worker.warm.check() == "2 of 2 links are not tested yet"
    worker.reports = (LinkReport(peer="p0@1", **report), LinkReport(peer="p1@1"))
    assert worker.warm.check() == "1 of 2 links are not tested yet"
    worker.reports = (LinkReport(peer="p0@1", **report), LinkReport(peer="p1@1", **report))
    assert worker.warm.check() is None


def test_later_peers_do_not_revoke_readiness():
    worker = Worker()
    worker.peers = ()
    assert worker.warm.check() is None
    worker.peers = (peer("p0"),)
    assert worker.warm.check() is None


def test_link_wait_is_bounded():
    worker = Worker(timeout_s=20.0)
    worker.peers = (peer("p0"),)
    assert worker.warm.check() is not None
    worker.clock.advance(19.9)
    assert worker.warm.check() is not None
    worker.clock.advance(0.2)
    assert worker.warm.check() is None


def test_link_wait_of_zero_waits_for_nothing():
    assert Worker(timeout_s=0.0).warm.check() is None
