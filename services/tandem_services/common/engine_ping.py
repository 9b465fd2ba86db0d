"""Checks over a separate connection whether an engine of a given incarnation is alive.

The connection is authenticated by the keys of the deployment, so an answer proves two things: the engine belongs to the
deployment, and its scheduler loop runs.
"""

import asyncio

from tandem_engine.base.errors import WireError
from tandem_engine.ipc.async_channels import AsyncDealerChannel
from tandem_engine.ipc.channels import IpcContext
from tandem_engine.messages.outputs import EngineReply, Pong
from tandem_engine.messages.requests import EngineRequest, Ping

ASK_EVERY_S = 0.5
Channel = AsyncDealerChannel[EngineReply, EngineRequest]


async def answers(
    context: IpcContext, endpoint: str, incarnation: str, *, within_s: float, ask_every_s: float = ASK_EVERY_S
) -> bool:
    """Whether `incarnation`, and no other at `endpoint`, answers a ping within `within_s`.

    The connection is opened again for as long as it is refused.
    """
    try:
        channel: Channel = AsyncDealerChannel(context, endpoint, inbound=EngineReply, outbound=EngineRequest)
    except WireError:
        return False
    try:
        async with asyncio.timeout(within_s):
            while not await _answers_now(channel, incarnation, ask_every_s):
                continue
    except (TimeoutError, WireError):
        return False
    finally:
        channel.close()
    return True


async def _answers_now(channel: Channel, incarnation: str, within_s: float) -> bool:
    channel.send(Ping(nonce=0))
    try:
        async with asyncio.timeout(within_s):
            reply = await channel.receive()
    except TimeoutError:
        return False
    return isinstance(reply, Pong) and reply.incarnation == incarnation
