"""What a gateway needs of the router: workers for one attempt, and their reservation back."""

from typing import Protocol

from tandem_services.router.choice import Choice, RouteQuery, WorkerView
from tandem_services.router.member_proofs import MemberProofs
from tandem_services.router.registry import WorkerState


class PairChooser(Protocol):
    """What the gateway needs of the router."""

    async def choose(self, query: RouteQuery) -> Choice:
        """Reserve and return the best workers. Raises `NoWorkersError` when nobody can take it now."""
        ...

    async def redeem(self, ticket_id: str, query: RouteQuery) -> Choice | None:
        """What a stand-alone router chose and reserved for this prompt; None when that does not hold."""
        ...

    async def stay(self, query: RouteQuery, incarnation: str) -> Choice:
        """Reserve and return this worker alone. Raises `NoWorkersError` when it is gone."""
        ...

    async def relocate(self, query: RouteQuery, leaving: WorkerView) -> Choice:
        """Reserve and return who takes over from `leaving`, which is the choice's prefill worker.

        Raises `NoWorkersError` when nobody has room.
        """
        ...

    async def release(self, choice: Choice) -> None:
        """Give the reservation back. Called exactly once per choice."""
        ...

    def workers(self) -> tuple[WorkerView, ...]:
        """All live workers, from memory."""
        ...

    def rely_on(self, proofs: MemberProofs) -> None:
        """Choose nobody from now on who does not prove to be a member."""
        ...

    def mark_dead(self, incarnation: str) -> None:
        """The connection to this worker was lost: do not choose it for a while, whatever the registry says."""
        ...

    def mark_alive(self, incarnation: str) -> None:
        """It has answered since: choose it again, if the registry has it."""
        ...

    def note_refusal(self, incarnation: str, state: WorkerState) -> None:
        """It has sent a request away because it is in `state`: do not choose it again until the registry says more."""
        ...
