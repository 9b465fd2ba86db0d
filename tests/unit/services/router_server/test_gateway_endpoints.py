"""Which gateways an Inference Gateway is sent to."""

from random import Random

import httpx
import pytest
from prometheus_client import CollectorRegistry

from tandem_engine.base.addresses import Address
from tandem_engine.base.errors import ConfigError
from tandem_services.common.errors import ApiError
from tandem_services.router_server.endpoint_picker import RESOLVE_EVERY_S, GatewayEndpoints, gateway_address
from tandem_services.router_server.routing_service import RouterMetrics
from tandem_testing.service_clock import ServiceClock

ONE, TWO, THREE, FOUR = (f"10.0.0.{number}:8000" for number in range(1, 5))


def make(*places: str, ready: tuple[str, ...] = ()) -> GatewayEndpoints:
    return GatewayEndpoints(
        places=tuple(map(gateway_address, places)),
        clock=ServiceClock(),
        random=Random(1),
        metrics=RouterMetrics(CollectorRegistry()),
        ready=frozenset(ready),
    )


@pytest.mark.parametrize("text", ["", "host", "host:", ":80", "host:0", "host:70000", "host:x", "host:٣"])
def test_gateway_that_is_no_host_and_port_is_refused(text):
    with pytest.raises(ConfigError, match="HOST:PORT"):
        gateway_address(text)


def test_ipv6_addresses_are_written_in_brackets():
    assert gateway_address("[::1]:8000") == Address("::1", 8000)


def test_least_loaded_endpoint_is_first_of_three():
    endpoints = make("pool:8000", ready=(ONE, TWO, THREE, FOUR))
    for endpoint, running in ((ONE, 3), (TWO, 1), (THREE, 2), (FOUR, 4)):
        for _ in range(running):
            endpoints.began(endpoint)
    assert endpoints.choose(None) == (TWO, THREE, ONE)
    for _ in range(3):
        endpoints.ended(ONE)
    assert endpoints.choose(None)[0] == ONE


def test_ties_are_broken_at_random():
    endpoints = make("pool:8000", ready=(ONE, TWO))
    assert {endpoints.choose(None)[0] for _ in range(50)} == {ONE, TWO}


@pytest.mark.parametrize(
    ("places", "ready", "subset", "expected"),
    [
        (("pool:8000",), (ONE, TWO), (TWO, THREE), (TWO,)),
        (("pool:8000",), (ONE,), None, (ONE,)),
        ((), (), (TWO,), (TWO,)),
        ((), (), (TWO, "name:80", "[::1]:70000", ""), (TWO,)),
        (("pool:8000",), (ONE,), (TWO,), None),
        (("pool:8000",), (ONE,), (), None),
        (("pool:8000",), (), None, None),
        ((), (), None, None),
        ((), (), ("name:80",), None),
    ],
)
def test_only_ready_endpoints_of_subset_are_chosen(places, ready, subset, expected):
    endpoints = make(*places, ready=ready)
    if expected is not None:
        assert endpoints.choose(subset) == expected
        return
    with pytest.raises(ApiError) as caught:
        endpoints.choose(subset)
    assert (caught.value.status, caught.value.retry_after) == (503, 2.0)


async def test_endpoints_with_status_200_are_ready():
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.port == 8002:
            raise httpx.ConnectError("refused")
        return httpx.Response(200 if request.url.port == 8000 else 503)

    endpoints = make("127.0.0.1:8000", "127.0.0.1:8001", "127.0.0.1:8002")
    assert endpoints.failure() is not None
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        await endpoints.refresh(client)
    assert endpoints.ready == {"127.0.0.1:8000"}
    assert endpoints.failure() is None


async def test_last_addresses_stay_while_name_cannot_be_resolved(monkeypatch):
    answers = [{ONE, TWO}, OSError("no such name"), {THREE}]

    async def addresses(place: Address) -> set[str]:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr("tandem_services.router_server.endpoint_picker.addresses_of", addresses)
    endpoints = make("pool:8000")
    transport = httpx.MockTransport(lambda _: httpx.Response(200))
    seen = []
    async with httpx.AsyncClient(transport=transport) as client:
        for _ in range(3):
            await endpoints.refresh(client)
            await endpoints.refresh(client)
            seen.append(endpoints.ready)
            endpoints.clock.advance(RESOLVE_EVERY_S)
    assert seen == [{ONE, TWO}, {ONE, TWO}, {THREE}]
