"""The synchronous client of a `RouterChannel` that answers."""

from typing import Generic

from tandem_engine.errors import WireError
from tandem_engine.ipc.channels import DealerChannel, In, IpcContext, Out
from tandem_engine.ipc.poller import Poller
from tandem_engine.messages.codec import Codec


class CallChannel(Generic[In, Out]):
    """Sends `Out` and receives `In`. Reconnects by itself; what was on its way then is lost, so callers ask again.

    One thread at a time. Raises `WireError` for an endpoint that cannot be one.
    """

    def __init__(self, context: IpcContext, endpoint: str, *, inbound: object, outbound: object) -> None:
        self._out: DealerChannel[Out] = DealerChannel(context, endpoint, outbound=outbound)
        self._inbound: Codec[In] = Codec(inbound)
        self._poller = Poller([self._out.socket])
        self.refused = 0
        """Messages that did not decode since start."""

    def send(self, message: Out) -> bool:
        """False when the queue is full, because nobody has answered for long."""
        return self._out.send(message)

    def receive(self, timeout_s: float) -> In | None:
        """The next message, or None when there is none within `timeout_s`. Undecodable ones are counted."""
        while self._poller.wait(timeout_s):
            try:
                return self._inbound.decode(self._out.socket.recv())
            except WireError:
                self.refused += 1
        return None

    def close(self) -> None:
        self._out.close()
