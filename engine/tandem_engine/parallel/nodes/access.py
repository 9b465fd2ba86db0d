"""How the nodes of an engine reach each other, and who may.

Everything between nodes that is not tensors goes over ZMQ with the deployment's CURVE keys, to one port of node 0: who
takes part, the addresses at which groups meet, signs of life. Off loopback nothing of it works without keys
[private-channels].
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from tandem_engine.addresses import LOOPBACK
from tandem_engine.ipc.channels import IpcContext
from tandem_engine.ipc.keys import KeyPair


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeAccess:
    """Of this node."""

    host: str = LOOPBACK
    """Address that the other nodes reach this one at: its groups listen there and nowhere else."""
    curve_keys: Path | None = None
    """Key file of the deployment."""

    def open(self) -> IpcContext:
        """A context that checks keys. Raises `ConfigError` when `host` is no loopback address and there are none."""
        context = IpcContext(None if self.curve_keys is None else KeyPair.load(self.curve_keys))
        try:
            context.require_keys_off_loopback(self.host)
        except Exception:
            context.close()
            raise
        return context


class Meeting(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank meets those of other nodes, as part of its `RankOrder`."""

    endpoint: str
    """Of the leader."""
    session: str
    host: str
    curve_keys: str | None

    @property
    def access(self) -> NodeAccess:
        return NodeAccess(host=self.host, curve_keys=None if self.curve_keys is None else Path(self.curve_keys))
