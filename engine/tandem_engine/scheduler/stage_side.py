"""The scheduler as queue stages see it: what a stage may call, from inside its own methods.

    admit_prebuilt, finish    for a request that `accept` kept; each takes it over
    release, finish           for one that `prefill_settled` kept: its KV was sent, or it failed

The rest tells what a stage may reserve of the memory and the places that requests of the scheduler need as well.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from tandem_engine.clock import Clock
from tandem_engine.memory.kv_memory import KvMemory
from tandem_engine.messages.outputs import Finish
from tandem_engine.scheduler.kept_back import KeptBack, kept_back
from tandem_engine.scheduler.parts import SchedulerParts, Shared
from tandem_engine.scheduler.prefill_adder import expected_pages
from tandem_engine.scheduler.request import Request


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSide:
    """One per scheduler."""

    shared: Shared
    parts: SchedulerParts

    @property
    def memory(self) -> KvMemory:
        return self.shared.memory

    @property
    def clock(self) -> Clock:
        """What decisions go by."""
        return self.shared.clock

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self.shared.facts.vocab_size

    @property
    def launched(self) -> int:
        """Steps launched since start."""
        return self.shared.tally.launched

    @property
    def step_in_flight(self) -> int | None:
        """Newest launched step that has not settled: what freed memory has to wait for."""
        return self.shared.steps.newest_in_flight

    def admit_prebuilt(self, req: Request) -> None:
        """`req` joins the running batch at the next plan; the stage gives it up.

        The stage has set `req.kv`, with KV of all tokens but the newest committed; at least one token in
        `req.output_ids`; and `req.streamed`, those that somebody else sends to the client. `req.transfer`
        goes out with the next output. An output that is complete already (`stop_of`) belongs to `finish`.
        """
        assert req.output_ids, f"prebuilt request {req.rid} has no token to continue from"
        kv = req.held_kv
        assert kv.committed_len == req.seq_len - 1, (
            f"prebuilt request {req.rid} of {req.seq_len} tokens has KV of {kv.committed_len}"
        )
        assert req.remaining_tokens > 0, f"prebuilt request {req.rid} has its {len(req.output_ids)} tokens already"
        req.extend_target = req.launched_len = kv.committed_len
        self.shared.queues.take_over(req)
        if req.to_finish is not None:
            self.shared.queues.wishes.append(req)

    def stop_of(self, req: Request) -> Finish | None:
        """How the newest token of `req.output_ids` ends the output, None if it does not."""
        *outputs, newest = req.output_ids
        cut = self.shared.stop.cut_at_stop(req.sampling, prompt_len=req.prompt_len, outputs=outputs, run=(newest,))
        return cut.finish

    def release(self, req: Request, *, checkpoint: bool = True) -> None:
        """Give back row and pages of a request that a stage keeps. The only way to do so; no-op without KV.

        `checkpoint` leaves its settled whole pages in the prefix cache. The client hears nothing.
        """
        self.parts.endings.release(req, checkpoint=checkpoint)
        self.shared.queues.leave_group(req)
        self.shared.ended.note(req, None)

    def finish(self, req: Request, finish: Finish, *, checkpoint: bool = True) -> None:
        """End a request that a stage keeps: release it, tell the client, call `aborted` if it failed."""
        self.parts.endings.finish(req, finish, checkpoint=checkpoint)

    def spare_pages(self) -> int:
        """Free and evictable pages beyond what admitted requests and the head of the queue are expected to take.

        May be negative. A stage that reserves pages for requests to come stays within it, so that it
        neither pushes running requests into retraction nor starves the queue.
        """
        spare = self.memory.available_pages() - self.parts.planner.reserved_pages()
        head = self.shared.queues.head
        if head is not None:
            spare -= expected_pages(self.memory, head, head.seq_len, self.shared.ratio.value)
        return spare

    def kept_back(self, req: Request) -> KeptBack:
        """What `req`, for which a stage reserves memory, has to leave to prompts that other workers wait for."""
        return kept_back(self.memory, self.shared.queues, req)

    def give_way(self) -> bool:
        """Make pages evictable that only wait for a next turn. False when there are none."""
        return self.parts.sessions.give_way()

    def next_outside(self, requests: Iterable[Request]) -> Request | None:
        """See `Policy.next_outside`."""
        return self.shared.policy.next_outside(requests)

    def spare_requests(self) -> int:
        """Requests that the running batch can still take. May be negative. A stage counts its own on top."""
        queues = self.shared.queues
        taken = len(queues.running) + len(queues.parked()) + (queues.chunked is not None)
        taken += sum(1 for _ in self.parts.isolation.suspects())
        return self.shared.config.max_running_requests - taken
