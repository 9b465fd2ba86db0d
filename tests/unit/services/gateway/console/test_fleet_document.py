"""The console's document of the fleet: bounded, without addresses, and valid for any content of Redis."""

import msgspec

from tandem_engine.config import Role
from tandem_services.common.health import Health
from tandem_services.gateway.console.fleet_document import (
    MAX_CHARACTERS,
    MAX_LINKS_SHOWN,
    MAX_WORKERS_SHOWN,
    FleetDocument,
    GatewayFigures,
    ViewedFleet,
    fleet_document,
    latest_requests,
    traffic,
)
from tandem_services.gateway.http.sse import encode_json
from tandem_services.gateway.observe.explain import ChoiceRecord, RequestJournal, RequestRecord
from tandem_services.router.registry import WorkerState
from tandem_testing.console_builders import ScriptedFleet, link, member, starting


def gateway_figures(health: Health | None = None) -> GatewayFigures:
    return GatewayFigures(
        health=health or Health(),
        running=lambda: 2,
        waiting=lambda: 1,
        journal=RequestJournal(4),
        latency=tuple,
        uptime_s=lambda: 7.0,
        requires_key=False,
    )


def described(*members, age_s: float = 0.4, health: Health | None = None) -> FleetDocument:
    fleet = ScriptedFleet(members=list(members), age_s=age_s)
    return fleet_document([ViewedFleet("blue", fleet)], gateway_figures(health))


def test_fleet_document_of_several_fleets_has_the_age_of_the_oldest_view():
    chat = ScriptedFleet(members=[member("a", Role.DECODE, model="chat")])
    code = ScriptedFleet(members=[member("b", Role.PREFILL, model="code")], age_s=7.0)
    document = fleet_document([ViewedFleet("blue", chat, "org/chat@c0"), ViewedFleet("red", code)], gateway_figures())
    assert document.gateway.roots == ("org/chat@c0",)
    assert [(worker.worker_id, worker.model) for worker in document.workers] == [("b", "code"), ("a", "chat")]
    assert (document.gateway.clusters, document.redis, document.view_age_s) == (("blue", "red"), "away", 7.0)


def test_fleet_document_orders_workers_with_statistics():
    document = described(member("b", Role.BOTH), member("d", Role.DECODE), member("p", Role.PREFILL))
    assert [worker.worker_id for worker in document.workers] == ["p", "d", "b"]
    figures = document.workers[0].figures
    assert figures is not None
    assert (figures.running, figures.cached_tokens_total, figures.output_tokens_per_s) == (3, 600, 212.5)
    assert (document.gateway.running, document.gateway.waiting, document.gateway.clusters) == (2, 1, ("blue",))


def test_states_are_the_registrys_but_for_lost_connections():
    document = described(
        member("a", state=WorkerState.DRAINING),
        member("b", state=WorkerState.PAUSED),
        member("c", suspect=True),
        member("d"),
        member("e", suspect=True, skewed=True),
    )
    assert [worker.state for worker in document.workers] == ["draining", "paused", "suspect", "ready", "skewed"]


def test_redis_is_away_once_a_lease_has_passed_without_an_answer():
    assert described(age_s=1.2).redis == "answering"
    assert described(age_s=3.0).redis == "away"


def test_drained_gateway_says_so():
    health = Health()
    health.drain()
    assert described(health=health).gateway.draining


def test_fleet_document_lists_starting_workers_with_phase():
    fleet = ScriptedFleet(
        members=[member("a")], starting=[starting("a"), starting("b", Role.DECODE, phase="imports", total=0)]
    )
    (row,) = fleet_document([ViewedFleet("blue", fleet)], gateway_figures()).starting
    assert (row.worker_id, row.role, row.progress, row.share) == ("b", "decode", "imports", None)
    fleet.members.clear()
    document = fleet_document([ViewedFleet("blue", fleet)], gateway_figures())
    assert [(each.progress, each.share) for each in document.starting] == [
        ("weights 25 % of 4.00 GiB", 0.25),
        ("imports", None),
    ]


def test_fleet_document_has_no_worker_addresses():
    reported = encode_json(described(member("w1", links=(link("w2"),))))
    assert b"tcp://" not in reported
    assert b"5600" not in reported


def test_large_fleet_is_cut_off_and_counted():
    many = [member(f"w{i}", links=tuple(link(f"x{k}") for k in range(3))) for i in range(MAX_WORKERS_SHOWN + 9)]
    document = described(*many)
    assert (len(document.workers), document.workers_total) == (MAX_WORKERS_SHOWN, MAX_WORKERS_SHOWN + 9)
    assert (len(document.links), document.links_total) == (MAX_LINKS_SHOWN, 3 * (MAX_WORKERS_SHOWN + 9))


def test_troubled_links_come_first():
    links = (link("good"), link("slow", condition="expected rdma, got tcp"), link("gone", broken=True))
    document = described(member("w1", links=links))
    assert [each.target for each in document.links] == ["gone@1", "slow@1", "good@1"]
    assert document.links[1].problem == "expected rdma, got tcp"


def test_texts_of_any_length_are_cut():
    document = described(member("w" * 5000, model="m" * 5000, links=(link("p" * 5000, problem="x" * 5000),)))
    texts = (
        document.workers[0].worker_id,
        document.workers[0].model,
        document.links[0].target,
        document.links[0].problem,
    )
    assert {len(text) for text in texts} == {MAX_CHARACTERS}


def test_invalid_worker_statistics_are_none_and_worker_is_kept():  # [redis-values-untrusted]
    for value in ("-1", "nan", "x", "9" * 40, "1.5"):
        document = described(member("w1", figures={"running": value}))
        assert document.workers[0].figures is None, value
    assert described(member("w1", figures={"output_tokens_per_s": "inf"})).workers[0].figures is None


def test_document_is_json_that_reads_back():
    document = described(member("w1", links=(link("w2"),)))
    assert msgspec.json.decode(encode_json(document), type=FleetDocument) == document


def ended(number: int, *, ttft_s: float, status: int = 200) -> RequestRecord:
    record = RequestRecord(
        request_id=f"r{number}",
        client_request_id=None,
        endpoint="/v1/completions",
        model="m",
        requested_model="m",
        stream=False,
        prompt_tokens=10,
        n=1,
        created=number,
        choices=[ChoiceRecord(index=0, ttft_s=ttft_s, cached_tokens=4, output_tokens=2)],
        status=status,
    )
    record.e2e_s = ttft_s + 1
    return record


def test_traffic_is_of_the_last_requests_that_have_ended():
    journal = RequestJournal(1000)
    for number in range(300):
        journal.open(ended(number, ttft_s=number / 1000, status=200 if number % 10 else 503))
    unfinished = ended(300, ttft_s=9.0)
    unfinished.e2e_s = None
    journal.open(unfinished)
    lately = traffic(journal)
    assert (lately.accepted_total, lately.finished, lately.failed, journal.running) == (301, 199, 19, 1)
    assert (lately.ttft_p50_s, lately.ttft_p95_s) == (0.200, 0.290)
    assert (lately.prompt_tokens, lately.cached_tokens) == (1990, 796)


def test_without_requests_traffic_has_no_times():
    lately = traffic(RequestJournal(4))
    assert (lately.finished, lately.ttft_p50_s, lately.ttft_p95_s) == (0, None, None)


def test_latest_requests_come_newest_first_and_bounded():
    journal = RequestJournal(1000)
    for number in range(150):
        journal.open(ended(number, ttft_s=0.1))
    rows = latest_requests(journal)
    assert (len(rows), rows[0].request_id, rows[-1].request_id) == (100, "r149", "r50")
    assert (rows[0].decode, rows[0].attempts, rows[0].ttft_s, rows[0].cached_tokens) == (None, 0, 0.1, 4)
