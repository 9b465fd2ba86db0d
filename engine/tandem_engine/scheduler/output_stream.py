"""Outputs to clients: one `TokenOutput` per request and completed step, one delivery per client and step.

`index` is the absolute position in the output. A receiver that gets a position twice, after a resumption or from both
workers of a handoff, keeps the first.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from tandem_engine.messages.outputs import Finish, TokenLogprob, TokenOutput
from tandem_engine.scheduler.request import Request

Sink: TypeAlias = Callable[[bytes, tuple[TokenOutput, ...]], None]
"""Takes the outputs of one step for one client. Called on the scheduler thread; must not block."""


def discard(client: bytes, outputs: tuple[TokenOutput, ...]) -> None:
    """The `Sink` of a rank whose outputs another rank sends."""
    del client, outputs


@dataclass(kw_only=True, slots=True)
class OutputStream:
    """Collects outputs during a step and delivers them at its end."""

    sink: Sink
    pending: defaultdict[bytes, list[TokenOutput]] = field(default_factory=lambda: defaultdict(list))

    def send(self, req: Request, *, finish: Finish | None = None, first: bool = False) -> None:
        """Queue what `req` has that was not streamed, and how it ended.

        `first` adds the timings, the cache hit, the transfer and what was asked of the prompt: once, with the first
        tokens of this worker.
        """
        output = self._output(req, finish, first)
        req.streamed = max(req.streamed, len(req.output_ids))
        self.pending[req.client].append(output)

    def send_token(self, req: Request, token: int) -> None:
        """`send` of a request that has one new token, no logprobs, and that has had its first output."""
        output = TokenOutput(rid=req.rid, index=req.streamed, token_ids=(token,))
        req.streamed += 1
        self.pending[req.client].append(output)

    def ask_to_leave(self, req: Request) -> None:
        """Notify the client of `req` that another worker should continue it."""
        self.pending[req.client].append(TokenOutput(rid=req.rid, index=req.streamed, leaving=True))

    def flush(self) -> None:
        """Deliver everything that is pending."""
        if not self.pending:
            return
        pending, self.pending = self.pending, defaultdict(list)
        for client, outputs in pending.items():
            self.sink(client, tuple(outputs))

    def _output(self, req: Request, finish: Finish | None, first: bool) -> TokenOutput:
        tokens = tuple(req.output_ids[req.streamed :])
        # A handed-over request has it from the handoff record: the prefill worker's output may come too late.
        cache_hit_known = first and (req.first_scheduled_at is not None or req.transfer is not None)
        return TokenOutput(
            rid=req.rid,
            index=req.streamed,
            token_ids=tokens,
            logprobs=self._logprobs(req, len(tokens)),
            prompt_logprobs=self._prompt_logprobs(req) if first else None,
            embedding=None if req.pooled is None or not first else req.pooled.embedding(),
            finish=finish,
            cached_tokens=req.cached_tokens if cache_hit_known else None,
            cache_hits=req.cache_hits if cache_hit_known else None,
            transfer=req.transfer if first else None,
            fetch=req.fetched if first else None,
            queue_s=_elapsed(req.arrived_at, req.first_scheduled_at) if first else None,
            delay_s=(req.delayed_s or None) if first else None,
            adapter_wait_s=(req.adapter_wait_s or None) if first else None,
            prefill_s=_elapsed(req.first_scheduled_at, req.first_token_at) if first else None,
        )

    def _prompt_logprobs(self, req: Request) -> tuple[TokenLogprob | None, ...] | None:
        if req.prompt_logprobs is None:
            return None
        assert req.prompt_logprobs.complete, f"{req.rid} has a token and no logprob of {req.prompt_logprobs.next}"
        return tuple(req.prompt_logprobs.collected)

    def _logprobs(self, req: Request, tokens: int) -> tuple[TokenLogprob, ...] | None:
        if req.sampling.logprobs is None:
            return None
        return tuple(req.logprobs[len(req.logprobs) - tokens :])


def _elapsed(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
