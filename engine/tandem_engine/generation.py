"""What an in-process caller gets: outputs gathered per request, as a gateway would gather them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem_engine.messages.outputs import Finish, TokenLogprob, TokenOutput, TransferReport


@dataclass(kw_only=True, slots=True)
class Generation:
    """The output of one request so far."""

    rid: str
    resumed: int
    """Output tokens that the request came with; `token_ids` starts after them."""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    embedding: bytes | None = None
    """Little-endian float32 values, for a request with pooling."""
    cached_tokens: int = 0
    transfer: TransferReport | None = None
    finished: Finish | None = None

    @property
    def finish(self) -> Finish:
        """How it ended. Only for a request that has."""
        assert self.finished is not None, f"request {self.rid} has not finished"
        return self.finished

    def take(self, output: TokenOutput) -> None:
        """Accept what is new; positions that came before, from either of two workers, are dropped."""
        known = self.resumed + len(self.token_ids) - output.index
        assert known >= 0, f"{self.rid}: output {output.index} came before {self.resumed + len(self.token_ids)}"
        self.token_ids += output.token_ids[known:]
        if output.logprobs is not None:
            self.logprobs += output.logprobs[known:]
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self.embedding = output.embedding or self.embedding
        if output.cached_tokens is not None:
            self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
        self.transfer = output.transfer or self.transfer
        self.finished = output.finish or self.finished


@dataclass(kw_only=True, slots=True)
class Generations:
    """A sink for the scheduler that keeps everything by request id."""

    by_rid: dict[str, Generation] = field(default_factory=dict)

    def expect(self, rid: str, *, resumed: int = 0) -> Generation:
        self.by_rid[rid] = Generation(rid=rid, resumed=resumed)
        return self.by_rid[rid]

    def __call__(self, client: bytes, outputs: Sequence[TokenOutput]) -> None:
        del client  # in this process there is one
        for output in outputs:
            generation = self.by_rid.get(output.rid)
            if generation is not None:
                generation.take(output)

    def take_all(self, rids: Sequence[str]) -> list[Generation]:
        """Hand over finished generations, in the order of `rids`."""
        return [self.by_rid.pop(rid) for rid in rids]
