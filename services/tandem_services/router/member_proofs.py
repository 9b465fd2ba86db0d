"""What a router asks of whoever can prove that a worker is a member: that it answers over an authenticated socket.

A gateway has such sockets (`gateway.dispatch`); a stand-alone router has none, and goes by signed rows alone.
"""

from collections.abc import Iterable
from typing import Protocol

from tandem_services.router.choice import WorkerView


class MemberProofs(Protocol):
    """Belongs to the router's event loop."""

    def watch(self, workers: Iterable[WorkerView]) -> None:
        """These may be members: have them prove it, again and again, and no others."""
        ...

    def proven(self, incarnation: str) -> bool:
        """Whether it has answered lately."""
        ...

    async def prove(self, worker: WorkerView, *, within_s: float) -> bool:
        """Whether it answers within this time, or has lately."""
        ...
