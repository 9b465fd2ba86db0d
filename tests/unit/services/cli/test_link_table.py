"""`tandem ctl links` for people."""

import msgspec

from tandem_engine.base.names import LinkTransport
from tandem_engine.messages.stats import LinkReport
from tandem_services.cli.ctl import links_table


def table(*links: LinkReport) -> list[list[str]]:
    answered = msgspec.json.decode(msgspec.json.encode(links))
    return [line.split() for line in links_table(answered).splitlines()]


def test_measured_link_has_its_figures():
    link = LinkReport(peer="d@7", bytes_per_s=5.123e9, latency_s=0.00041, transport=LinkTransport.SHM, age_s=12.4)
    assert table(link)[1] == ["d@7", "5.12", "0.41", "ms", "shm", "12", "s"]


def test_link_without_figures_shows_reason():
    rows = table(
        LinkReport(peer="b@1", problem="no answer"),
        LinkReport(peer="a@1", transport=LinkTransport.TCP, condition="expected rdma, got tcp", broken=True),
    )
    assert rows[1] == ["a@1", "-", "-", "tcp", "-", "expected", "rdma,", "got", "tcp;", "broken"]
    assert rows[2] == ["b@1", "-", "-", "unknown", "-", "no", "answer"]


def test_no_links_are_a_header_alone():
    assert len(table()) == 1
