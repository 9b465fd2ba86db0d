"""A queue stage that takes part in nothing, for tests to override one method or fill one list."""

from collections.abc import Iterator, Sequence

from tandem_engine.base.names import PageId, ReqPoolIdx, RequestId
from tandem_engine.forward.kv_progress import KvProgress
from tandem_engine.messages.outputs import Finish
from tandem_engine.scheduler.request import Request
from tandem_engine.scheduler.stage import AwaitedPages


class FetchesNothing:
    """The part of a `QueueStage` that fetches and serves prefixes, for stages that do not."""

    def fetch(self, req: Request) -> AwaitedPages | None:
        return None

    def holds_for_a_while(self) -> bool:
        return False

    def forget_kv(self) -> None:
        """Nothing is served or on its way."""


class QuietStage(FetchesNothing):
    """Implements `QueueStage`. Records its calls."""

    def __init__(self, *, held: Sequence[PageId] = (), kept: Sequence[Request] = ()) -> None:
        self.held = list(held)
        self.kept = list(kept)
        self.aborted_rids: list[str] = []
        """rids that `aborted` named, in order."""
        self.chunks: list[tuple[str, int]] = []
        """(rid, committed length) at each settled chunk."""
        self.prefilled: list[tuple[str, bool]] = []
        """(rid, whether it had finished) at each settled prefill."""

    def accept(self, req: Request) -> bool:
        return False

    def poll(self) -> bool:
        return False

    def run_during_forward(self) -> bool:
        return False

    def chunk_launched(self, req: Request, stop: int, progress: KvProgress) -> None:
        """Nothing is sent before it is settled."""

    def chunk_settled(self, req: Request) -> None:
        self.chunks.append((req.rid, req.held_kv.committed_len))

    def prefill_settled(self, req: Request) -> bool:
        self.prefilled.append((req.rid, req.finished is not None))
        return False

    def aborted(self, req: Request) -> None:
        self.aborted_rids.append(req.rid)

    def abort(self, rid: RequestId, finish: Finish) -> bool:
        return False

    def live(self) -> Iterator[Request]:
        yield from self.kept

    def held_pages(self) -> Iterator[PageId]:
        yield from self.held

    def held_rows(self) -> Iterator[ReqPoolIdx]:
        yield from ()
