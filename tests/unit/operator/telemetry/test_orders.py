"""Orders to pods: the token, and what comes back."""

import json

import httpx
import pytest

from tandem_engine.ipc.keys import KeyPair
from tandem_operator.telemetry.worker_control import OrderFailedError, order_token, post_order
from tandem_services.common.tokens import order_token as token_of_services
from tandem_testing.pod_builders import pod


def client_of(answer) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.MockTransport(answer))


async def order(client: httpx.AsyncClient, **changes):
    return await post_order(
        client, changes.get("pod", pod("d0")), "health", "/role", {"role": "prefill"}, token="t", within_s=20.0
    )


def test_operator_derives_the_token_that_services_derive(tmp_path):
    keys = KeyPair.generate()
    keys.save(tmp_path / "keys.json")
    assert order_token((tmp_path / "keys.json").read_bytes()) == token_of_services(keys)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"secret": 5}', b'{"secret": "short"}', b"\xff"])
def test_malformed_key_file_gives_no_token(content):
    with pytest.raises(ValueError, match=r"keys\.json"):
        order_token(content)


async def test_order_brings_token_and_body():
    seen = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append((str(request.url), request.headers["authorization"], json.loads(request.content)))
        return httpx.Response(200, json={"message": "serving as prefill"})

    async with client_of(answer) as client:
        assert await order(client) == {"message": "serving as prefill"}
    assert seen == [("http://10.0.0.1:9090/role", "Bearer t", {"role": "prefill"})]


@pytest.mark.parametrize(
    ("response", "error_message"),
    [
        (httpx.Response(409, json={"message": "d0 is draining"}), "409.*d0 is draining"),
        (httpx.Response(200, text="<html>"), "200: <html>"),
        (httpx.Response(200, text="[1]"), r"200: \[1\]"),
        (httpx.Response(302, headers={"location": "http://elsewhere/"}), "302"),
    ],
)
async def test_rejection_of_a_pod_is_reported(response, error_message):
    async with client_of(lambda _: response) as client:
        with pytest.raises(OrderFailedError, match=error_message):
            await order(client)


async def test_missing_pod_or_address_is_reported():
    def gone(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    async with client_of(gone) as client:
        with pytest.raises(OrderFailedError, match="pod d0 cannot be reached"):
            await order(client)
        with pytest.raises(OrderFailedError, match="pod d0 has no address yet"):
            await order(client, pod=pod("d0", ip=""))
