"""Sockets of every kind bind to IPv6 addresses and connect to them."""

import asyncio

import pytest

from tandem_engine.base.errors import ConfigError, WireError
from tandem_engine.ipc.async_channels import AsyncDealerChannel
from tandem_engine.ipc.channels import CallChannel, IpcContext, RouterChannel
from tandem_engine.ipc.keys import KeyPair
from tandem_engine.messages.outputs import EngineReply, Pong
from tandem_engine.messages.requests import EngineRequest, Ping

WAIT = 30.0


@pytest.fixture(params=[None, KeyPair.generate()], ids=["plain", "keys"])
def context(request):
    made = IpcContext(request.param)
    yield made
    made.close()


@pytest.mark.parametrize("host", ["::1", "[::1]", "127.0.0.1"])
async def test_channel_bound_to_ipv6_loopback_carries_messages(context, host) -> None:
    router: RouterChannel[EngineRequest, EngineReply] = RouterChannel(
        context, host, 0, inbound=EngineRequest, outbound=EngineReply
    )
    calls: CallChannel[EngineReply, EngineRequest] = CallChannel(
        context, router.endpoint, inbound=EngineReply, outbound=EngineRequest
    )
    dealer: AsyncDealerChannel[EngineReply, EngineRequest] = AsyncDealerChannel(
        context, router.endpoint, inbound=EngineReply, outbound=EngineRequest
    )
    try:
        for channel in (calls, dealer):
            assert channel.send(Ping(nonce=7))
            identity = await asyncio.wait_for(asyncio.to_thread(first_sender, router), WAIT)
            assert router.send(identity, Pong(nonce=7, incarnation="w@1"))
        assert await asyncio.to_thread(calls.receive, WAIT) == Pong(nonce=7, incarnation="w@1")
        assert await asyncio.wait_for(dealer.receive(), WAIT) == Pong(nonce=7, incarnation="w@1")
    finally:
        calls.close()
        dealer.close()
        router.close()


def first_sender(router: "RouterChannel[EngineRequest, EngineReply]") -> bytes:
    while True:
        for identity, _ in router.receive():
            return identity


@pytest.mark.parametrize("host", ["::1::5", "a b", "[10.0.0.7]"])
def test_host_that_is_no_address_is_refused(host) -> None:
    context = IpcContext(KeyPair.generate())
    with pytest.raises(ConfigError, match="is not a host name or an IP address"):
        RouterChannel(context, host, 0, inbound=EngineRequest, outbound=EngineReply)
    context.close()


@pytest.mark.parametrize("endpoint", ["tcp://::1::5", "ipc:///run/other", "tcp://[::1]", "http://[::1]:5"])
def test_endpoint_that_is_no_tcp_address_is_a_wire_error(context, endpoint) -> None:
    with pytest.raises(WireError, match="cannot connect"):
        CallChannel(context, endpoint, inbound=EngineReply, outbound=EngineRequest)
