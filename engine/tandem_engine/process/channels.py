"""The sockets of an engine process: one that gateways send requests to, one to the worker service that started it."""

from dataclasses import dataclass, field

from tandem_engine.ipc.channels import PairChannel, RouterChannel
from tandem_engine.messages.control import EngineToWorker, WorkerToEngine
from tandem_engine.messages.outputs import EngineReply, OutputBatch, TokenOutput
from tandem_engine.messages.requests import EngineRequest

Requests = RouterChannel[EngineRequest, EngineReply]
Control = PairChannel[WorkerToEngine, EngineToWorker]


@dataclass(kw_only=True, slots=True)
class Outbox:
    """Sends outputs to gateways. One that is gone gets nothing more and its requests are aborted."""

    channel: Requests | None = None
    """None until the engine is built and the socket bound."""
    unreachable: set[bytes] = field(default_factory=set)

    def __call__(self, client: bytes, outputs: tuple[TokenOutput, ...]) -> None:
        if self.channel is not None and not self.channel.send(client, OutputBatch(outputs=outputs)):
            self.unreachable.add(client)
