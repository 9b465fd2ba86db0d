"""What is new is tried before clients reach it: canaries that are waited for or not, and whose standby ends by them."""

import asyncio
from dataclasses import replace

import httpx
import pytest

from tandem_operator.controller.canaries import RETRY_S, CanaryBook
from tandem_operator.controller.trials import Trials
from tandem_operator.planning.observed import Canary
from tandem_operator.telemetry.orders import OrderFailedError
from tandem_operator.telemetry.pods import PodSeen
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
    """Workers over HTTP: what `/ready` says of each, by address, and who was offered."""

    def __init__(self) -> None:
        self.standing_by = {one.ip for one in NEW}
        self.offered: list[str] = []
        self.deaf: set[str] = set()
        self.asked: list[str] = []

    def answer(self, request: httpx.Request) -> httpx.Response:
        host = request.url.host
        if host in self.deaf:
            raise httpx.ConnectError("refused")
        if request.url.path == "/offer":
            assert request.headers["authorization"] == "Bearer token"
            self.offered.append(host)
            self.standing_by.discard(host)
            return httpx.Response(200, json={"message": "offered to the router"})
        self.asked.append(host)
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

        def made(send, *, token=token) -> Trials:
            return Trials(client, token, send, CanaryBook(600.0), clock=lambda: now[0])

        yield made


def answering(**answers: Canary):
    """Sends canaries: each revision's answer, `gateway` that of the gateway; notes the pairs."""

    async def send(ask, _):
        send.pairs.append((ask.revision, *(one.name for one in ask.pair or ())))
        return answers[ask.revision or "gateway"]

    send.pairs = []
    return send


async def turn(trials: Trials, *workers: PodSeen, wanted=None) -> dict[str, Canary]:
    return await trials.turn(subject(wanted, pods=(GATEWAY, *workers)), patience_s=None)


async def test_the_first_time_it_waits_for_its_canaries(make):
    send = answering(r1=GOOD, gateway=GOOD)
    assert await turn(make(send), *OLD) == {"r1": GOOD, "": GOOD}


async def test_later_a_slow_canary_is_asked_once_and_not_waited_for(make):
    answered, asked = asyncio.Event(), []

    async def send(ask, token):
        assert token == "token"
        asked.append(ask.revision)
        await answered.wait()
        return GOOD

    trials, seen = make(send), subject(pods=(GATEWAY, *OLD))
    assert await trials.turn(seen, patience_s=0.0) == {}
    assert await trials.turn(seen, patience_s=0.0) == {}
    assert sorted(asked) == ["", "r1"]
    assert trials.expecting
    answered.set()
    await asyncio.wait([task for _, task in trials.asking.values()])
    assert await trials.turn(seen, patience_s=0.0) == {"r1": GOOD, "": GOOD}
    assert not trials.expecting
    trials.close()


async def test_without_a_key_file_the_canary_says_so(make):
    async def no_token(_):
        raise OrderFailedError("Secret 'chat-curve' does not exist yet")

    found = await turn(make(answering(), token=no_token), *OLD)
    assert found["r1"] == Canary(passed=False, message="Secret 'chat-curve' does not exist yet")


async def test_workers_of_a_revision_are_offered_when_its_canary_has_passed(make, fleet):
    send = answering(r1=GOOD, r2=GOOD, gateway=GOOD)
    trials = make(send)
    await turn(trials, *OLD, *NEW)
    assert ("r2", "p2", "d2") in send.pairs
    assert sorted(fleet.offered) == [one.ip for one in NEW]
    assert trials.expecting, "until their pods are Ready"
    await turn(trials, *OLD, *(replace(one, ready=True) for one in NEW))
    assert not trials.expecting
    assert len(fleet.offered) == len(NEW)


async def test_nobody_is_offered_before(make, fleet, now):
    answers = {"r1": GOOD, "r2": BAD, "gateway": GOOD}

    async def send(ask, _):
        return answers[ask.revision or "gateway"]

    trials = make(send)
    for _ in range(3):
        assert not (await turn(trials, *OLD, *NEW))["r2"].passed
        now[0] += RETRY_S
    assert fleet.offered == []
    answers["r2"] = GOOD
    await turn(trials, *OLD, *NEW)
    assert len(fleet.offered) == 3


async def test_a_revision_is_tried_with_workers_on_standby_alone_and_the_gateway_not_yet(make, fleet):
    """A first revision: nobody can be chosen by the router, and none of its pods is Ready."""
    send = answering(r2=GOOD)
    assert await turn(make(send), *NEW) == {"r2": GOOD}
    assert len(fleet.offered) == 3
    fleet.standing_by = set()
    send.pairs.clear()
    assert await turn(make(send), *NEW) == {}, "they load their model"
    assert send.pairs == []


async def test_another_leader_goes_on_from_what_the_workers_say(make, fleet):
    """The one before was killed between the canary and the orders: nothing that it knew is needed."""
    fleet.deaf = {NEW[1].ip, NEW[2].ip}
    send = answering(r1=GOOD, r2=GOOD, gateway=GOOD)
    await turn(make(send), *OLD, *NEW)
    assert fleet.offered == []
    fleet.deaf = {NEW[2].ip}
    await turn(make(send), *OLD, *NEW)
    fleet.deaf = set()
    await turn(make(send), *OLD, *(replace(one, ready=True) for one in NEW[:2]), NEW[2])
    assert sorted(fleet.offered) == [one.ip for one in NEW]


async def test_an_order_that_fails_is_given_again(make, fleet):
    trials, send = make(answering(r1=GOOD, r2=GOOD, gateway=GOOD)), fleet.answer

    def refuse(request: httpx.Request) -> httpx.Response:
        return httpx.Response(409) if request.url.path == "/offer" else send(request)

    trials.client = httpx.AsyncClient(transport=httpx.MockTransport(refuse))
    await turn(trials, *OLD, *NEW)
    trials.client = httpx.AsyncClient(transport=httpx.MockTransport(send))
    await turn(trials, *OLD, *NEW)
    assert len(fleet.offered) == 3


async def test_where_nobody_prefills_there_is_no_pair_to_try(make, fleet):
    wanted = service_of(prefill={"replicas": 0})
    await turn(make(answering()), *NEW[1:], wanted=wanted)
    assert sorted(fleet.offered) == [one.ip for one in NEW[1:]]


async def test_with_canaries_switched_off_nobody_is_asked(make, fleet):
    trials = make(None)
    assert await turn(trials, *NEW) == {}
    assert (fleet.asked, trials.expecting) == ([], False)


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
async def test_whoever_says_something_else_does_not_stand_by(make, fleet, answer):
    trials = make(answering(r1=GOOD, gateway=GOOD))
    trials.client = httpx.AsyncClient(transport=httpx.MockTransport(lambda _: answer))
    await turn(trials, *OLD, *NEW)
    assert fleet.offered == []
