"""What is new is tried before clients reach it: canaries that are waited for or not, and whose standby ends by them."""

import asyncio
from dataclasses import replace

import httpx
import pytest

from tandem_operator.controller.canary_runner import (
    AT_ONCE,
    BAD_IN_A_ROW,
    REPEAT_S,
    RETRY_S,
    CanaryRequest,
    CanaryRunner,
    RevisionCanaries,
)
from tandem_operator.controller.observations import Observations
from tandem_operator.planning.observed import Canary
from tandem_operator.telemetry.pods import PodSeen
from tandem_operator.telemetry.worker_control import ModelAt, OrderFailedError
from tandem_testing.kube_cluster import service_of
from tandem_testing.kube_subjects import GATEWAY, subject
from tandem_testing.pod_builders import pod

GOOD, BAD = Canary(passed=True), Canary(passed=False, message="502")
OLD = (pod("p", "prefill"), pod("d"))
NEW = tuple(
    pod(name, role, revision="r2", ready=False, ip=f"10.0.1.{number}")
    for number, (name, role) in enumerate((("p2", "prefill"), ("d2", "decode"), ("d3", "decode")), start=1)
)


class Fleet:
    """Workers over HTTP: the response of `/ready`, by address, and the workers that were offered."""

    def __init__(self) -> None:
        self.standing_by = {one.ip for one in NEW}
        self.offered: list[str] = []
        self.deaf: set[str] = set()
        self.asked: list[str] = []
        self.held: list[str] = []
        self.old = False
        """Of a release that knows no `/hold`."""

    def answer(self, request: httpx.Request) -> httpx.Response:
        host = request.url.host
        if host in self.deaf:
            raise httpx.ConnectError("refused")
        if request.url.path == "/offer":
            assert request.headers["authorization"] == "Bearer token"
            self.offered.append(host)
            self.standing_by.discard(host)
            return httpx.Response(200, json={"message": "offered to the router"})
        if request.url.path == "/hold":
            self.held.append(host)
            return httpx.Response(404 if self.old else 200, json={})
        self.asked.append(host)
        if host in self.offered:
            return httpx.Response(200, json={"status": "ok"})
        status = "standby" if host in self.standing_by else "unavailable"
        return httpx.Response(503, json={"status": status, "reasons": []})


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


@pytest.fixture
def now() -> list[float]:
    return [0.0]


@pytest.fixture
async def make(fleet, now):
    async with httpx.AsyncClient(transport=httpx.MockTransport(fleet.answer)) as client:

        async def token(_):
            return "token"

        def made(send, *, token=token) -> CanaryRunner:
            return CanaryRunner(client, token, send, RevisionCanaries(600.0), clock=lambda: now[0])

        yield made


def answering(**answers: Canary):
    """Sends canaries: each revision's answer, `gateway` that of the gateway; notes the pairs."""
    return answering_from(answers)


def answering_from(answers: dict[str, Canary]):
    """As `answering`; `answers` may change."""

    async def send(ask, _):
        send.pairs.append((ask.revision, *(one.name for one in ask.pair or ())))
        return answers[ask.revision or "gateway"]

    send.pairs = []
    return send


async def turn(canary_runner: CanaryRunner, *workers: PodSeen, wanted=None) -> dict[str, Canary]:
    return await canary_runner.run_due(subject(wanted, pods=(GATEWAY, *workers)), timeout_s=None)


async def test_first_time_it_waits_for_its_canaries(make):
    send = answering(r1=GOOD, gateway=GOOD)
    assert await turn(make(send), *OLD) == {"r1": GOOD, "": GOOD}


async def test_slow_canary_is_sent_once_without_waiting(make):
    answered, asked = asyncio.Event(), []

    async def send(ask, token):
        assert token == "token"
        asked.append(ask.revision)
        await answered.wait()
        return GOOD

    canary_runner, seen = make(send), subject(pods=(GATEWAY, *OLD))
    assert await canary_runner.run_due(seen, timeout_s=0.0) == {}
    assert await canary_runner.run_due(seen, timeout_s=0.0) == {}
    assert sorted(asked) == ["", "r1"]
    assert canary_runner.expecting
    answered.set()
    await asyncio.wait([task for _, task in canary_runner.asking.values()])
    assert await canary_runner.run_due(seen, timeout_s=0.0) == {"r1": GOOD, "": GOOD}
    assert not canary_runner.expecting
    canary_runner.close()


async def test_canary_of_former_gateways_is_none_of_the_new_ones(make):
    unserved = Canary(passed=False, unserved=True, message="not served here yet")
    answers = {"r1": GOOD, "gateway": GOOD}
    canary_runner = make(answering_from(answers))
    assert await turn(canary_runner, *OLD) == {"r1": GOOD, "": GOOD}
    answers["gateway"] = unserved
    model = ModelAt("chat", "models.chat")
    behind = {name: service_of(model={"path": "/m"}, gatewayRef={"name": name}) for name in ("front", "other")}
    moved = replace(subject(behind["front"], pods=(GATEWAY, *OLD)), model=model)
    assert await canary_runner.run_due(moved, timeout_s=None) == {"r1": GOOD}
    answers["gateway"] = GOOD
    again = replace(moved, wanted=behind["other"])
    assert await canary_runner.run_due(again, timeout_s=None) == {"r1": GOOD, "": GOOD}
    observations = Observations(canaries={"r1": GOOD, "": GOOD}, via=canary_runner.via[0])
    assert observations.canaries_through("other") == {"r1": GOOD, "": GOOD}
    assert observations.canaries_through("") == {"r1": GOOD}


async def test_canary_without_key_file_reports_it(make):
    async def no_token(_):
        raise OrderFailedError("Secret 'chat-curve' does not exist yet")

    found = await turn(make(answering(), token=no_token), *OLD)
    assert found["r1"] == Canary(passed=False, message="Secret 'chat-curve' does not exist yet")


async def test_workers_are_offered_once_canary_of_revision_passes(make, fleet):
    send = answering(r1=GOOD, r2=GOOD, gateway=GOOD)
    canary_runner = make(send)
    await turn(canary_runner, *OLD, *NEW)
    assert ("r2", "p2", "d2") in send.pairs
    assert sorted(fleet.offered) == [one.ip for one in NEW[:2]], "those that the canary went through"
    assert fleet.held == []
    await turn(canary_runner, *OLD, *NEW)
    assert ("r2", "p2", "d3") in send.pairs, "with one that serves; the kubelet has not seen that yet"
    assert fleet.held == [NEW[2].ip]
    assert sorted(fleet.offered) == [one.ip for one in NEW]
    assert canary_runner.expecting, "until their pods are Ready"
    await turn(canary_runner, *OLD, *(replace(one, ready=True) for one in NEW))
    assert not canary_runner.expecting
    assert len(fleet.offered) == len(NEW)


async def test_worker_is_not_offered_before_its_canary_passes(make, fleet, now):
    answers = {"r1": GOOD, "r2": BAD, "gateway": GOOD}

    async def send(ask, _):
        return answers[ask.revision or "gateway"]

    canary_runner = make(send)
    for _ in range(3):
        assert not (await turn(canary_runner, *OLD, *NEW))["r2"].passed
        now[0] += RETRY_S
    assert fleet.offered == []
    answers["r2"] = GOOD
    await turn(canary_runner, *OLD, *NEW)
    await turn(canary_runner, *OLD, *NEW)
    assert len(fleet.offered) == 3


async def test_standby_revision_gets_a_canary_before_the_gateway(make, fleet):
    """A first revision: the router has no worker to choose, and none of its pods is Ready."""
    send = answering(r2=GOOD)
    assert await turn(make(send), *NEW) == {"r2": GOOD}
    assert len(fleet.offered) == 2
    fleet.standing_by, fleet.offered = set(), []
    send.pairs.clear()
    assert await turn(make(send), *NEW) == {}, "they load their model"
    assert send.pairs == []


async def test_new_leader_continues_from_worker_standby_state(make, fleet):
    """The one before was killed between the canary and the orders: nothing that it knew is needed."""
    fleet.deaf = {NEW[1].ip, NEW[2].ip}
    send = answering(r1=GOOD, r2=GOOD, gateway=GOOD)
    await turn(make(send), *OLD, *NEW)
    assert fleet.offered == []
    fleet.deaf = {NEW[2].ip}
    await turn(make(send), *OLD, *NEW)
    fleet.deaf = set()
    third = make(send)
    for _ in range(2):
        await turn(third, *OLD, *(replace(one, ready=True) for one in NEW[:2]), NEW[2])
    assert sorted(fleet.offered) == [one.ip for one in NEW]


async def test_order_that_fails_is_given_again(make, fleet):
    canary_runner, send = make(answering(r1=GOOD, r2=GOOD, gateway=GOOD)), fleet.answer

    def refuse(request: httpx.Request) -> httpx.Response:
        return httpx.Response(409) if request.url.path == "/offer" else send(request)

    canary_runner.client = httpx.AsyncClient(transport=httpx.MockTransport(refuse))
    await turn(canary_runner, *OLD, *NEW)
    canary_runner.client = httpx.AsyncClient(transport=httpx.MockTransport(send))
    await turn(canary_runner, *OLD, *NEW[:2])
    assert len(fleet.offered) == 2


ADDED = tuple(replace(one, revision="r1") for one in NEW[1:])
"""Decode workers of a revision that serves."""


def judging(bad: set[str], *, gateway: Canary = GOOD):
    """Canaries fail through the pods `bad`."""

    async def send(ask, _):
        send.pairs.append(tuple(one.name for one in ask.pair or ()))
        return gateway if ask.pair is None else BAD if bad & set(send.pairs[-1]) else GOOD

    send.pairs = []
    return send


async def turns(canary_runner: CanaryRunner, now: list[float], count: int, *workers: PodSeen) -> None:
    for _ in range(count):
        await turn(canary_runner, *workers)
        now[0] += RETRY_S


async def test_failing_worker_stays_on_standby_and_is_reported(make, fleet, now):
    bad = {"d2"}
    canary_runner = make(judging(bad))
    await turns(canary_runner, now, BAD_IN_A_ROW, *OLD, *ADDED)
    assert canary_runner.failing == {}
    await turns(canary_runner, now, 2, *OLD, *ADDED)
    assert fleet.offered == [ADDED[1].ip]
    assert canary_runner.failing == {"d2": "502"}
    assert fleet.held.count(ADDED[0].ip) >= BAD_IN_A_ROW, "else it would help itself"
    bad.clear()
    await turns(canary_runner, now, 1, *OLD, *ADDED)
    assert set(fleet.offered) == {one.ip for one in ADDED}
    await turns(canary_runner, now, 1, *OLD, *(replace(one, ready=True) for one in ADDED))
    assert canary_runner.failing == {}


async def test_failing_partner_keeps_no_worker_on_standby(make, fleet, now):
    """Each canary of a worker takes the next partner."""
    send = judging({"p1"})
    canary_runner = make(send)
    served = (pod("p0", "prefill"), pod("p1", "prefill"), pod("d"))
    await turns(canary_runner, now, 1, *served)
    canary_runner.book.take(now[0], CanaryRequest("r1", GATEWAY, (served[1], ADDED[0]), candidate=ADDED[0]), BAD)
    now[0] += RETRY_S
    await turns(canary_runner, now, 2, *served, ADDED[0])
    assert send.pairs[-2:] == [("p1", "d2"), ("p0", "d2")]
    assert fleet.offered == [ADDED[0].ip]


async def test_worker_passes_if_gateway_canaries_fail_too(make, fleet, now):
    """Prefill is broken altogether: more decode workers that compute prompts themselves are better than fewer."""
    broken: set[str] = set()
    send = judging(broken)
    canary_runner = make(send)
    await turns(canary_runner, now, 1, *OLD)
    broken.add("p")
    canary_runner.send = judging(broken, gateway=BAD)
    now[0] += REPEAT_S
    await turns(canary_runner, now, BAD_IN_A_ROW, *OLD, ADDED[0])
    await turns(canary_runner, now, 1, *OLD, ADDED[0])
    assert fleet.offered == [ADDED[0].ip]
    assert canary_runner.failing == {}


async def test_worker_that_starts_again_in_its_pod_is_tried_again(make, fleet, now):
    bad: set[str] = set()
    canary_runner = make(judging(bad))
    await turns(canary_runner, now, 2, *OLD, ADDED[0])
    assert fleet.offered == [ADDED[0].ip]
    fleet.offered.clear()
    fleet.standing_by.add(ADDED[0].ip)
    bad.add("d2")
    await turns(canary_runner, now, BAD_IN_A_ROW, *OLD, ADDED[0])
    assert fleet.offered == []


async def test_worker_without_partner_gets_no_canary_or_hold(make, fleet, now):
    """The worker helps itself; what it finds is not made worse by trying."""
    canary_runner = make(judging(set()))
    await turns(canary_runner, now, 1, *OLD)
    await turns(canary_runner, now, 2, OLD[1], ADDED[0])
    assert (fleet.offered, fleet.held) == ([], [])


async def test_worker_of_an_older_release_is_tried_without_being_held(make, fleet, now):
    fleet.old = True
    canary_runner = make(judging(set()))
    await turns(canary_runner, now, 2, *OLD, ADDED[0])
    assert fleet.offered == [ADDED[0].ip]


async def test_many_new_workers_get_canaries_in_bounded_batches(make, fleet, now):
    many = [pod(f"n{number:02}", ready=False, ip=f"10.0.2.{number}") for number in range(AT_ONCE + 3)]
    fleet.standing_by = {one.ip for one in many}
    send = judging({one.name for one in many})
    canary_runner = make(send)
    await turns(canary_runner, now, 1, *OLD)
    send.pairs.clear()
    await turn(canary_runner, *OLD, *many)
    assert len(send.pairs) == AT_ONCE
    now[0] += 1.0
    await turn(canary_runner, *OLD, *many)
    assert {decode for pair in send.pairs for decode in pair[1:]} == {one.name for one in many}


async def test_service_without_prefill_role_has_no_pair_canary(make, fleet):
    wanted = service_of(prefill={"replicas": 0})
    await turn(make(answering()), *NEW[1:], wanted=wanted)
    assert sorted(fleet.offered) == [one.ip for one in NEW[1:]]


async def test_canaries_switched_off_send_nothing(make, fleet):
    canary_runner = make(None)
    assert await turn(canary_runner, *NEW) == {}
    assert (fleet.asked, canary_runner.expecting) == ([], False)


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(200, json={"status": "ok"}),
        httpx.Response(503, text="standby"),
        httpx.Response(503, content=b'{"status": "\xff"}'),
        httpx.Response(503, json=["standby"]),
        httpx.Response(503, content=b'{"status": "standby", "reasons": ["' + b"x" * (1 << 17) + b'"]}'),
    ],
    ids=["ready", "text", "bytes", "list", "flood"],
)
async def test_unexpected_standby_reply_means_not_on_standby(make, fleet, answer):
    canary_runner = make(answering(r1=GOOD, r2=GOOD, gateway=GOOD))
    canary_runner.client = httpx.AsyncClient(transport=httpx.MockTransport(lambda _: answer))
    await turn(canary_runner, *OLD, *NEW)
    assert fleet.offered == []
