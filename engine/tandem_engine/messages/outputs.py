"""Messages from an engine to gateways."""

from enum import StrEnum

import msgspec


class FinishReason(StrEnum):
    STOP = "stop"
    """A stop id, EOS, a stop string, or a grammar that allows nothing more."""
    LENGTH = "length"
    """max_tokens or the context is used up."""
    ABORT = "abort"
    """The gateway asked for it, or a deadline passed."""
    ERROR = "error"
    """`Finish.error` says why; `retryable` says whether another attempt can help."""


class Finish(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why generation ended."""

    reason: FinishReason
    matched_stop: int | str | None = None
    """The stop id or stop string that ended it; None for EOS by generation config and for length."""
    by_grammar: bool = False
    """The output ended with its grammar. Its last token is text, which EOS and a stop id are not."""
    error: str | None = None
    code: str | None = None
    """Stable code of the error: invalid_request, queue_full, transfer_error, engine_error, …"""
    param: str | None = None
    retryable: bool = False


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, array_like=True, gc=False):
    """Log probability of one token, sampled or of the prompt, and of the most likely ones at its position."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob), most likely first."""
    rank: int | None = None
    """1 for the most likely token. Of prompt tokens only."""


class TransferReport(msgspec.Struct, frozen=True, kw_only=True):
    """What moved for one request, as its decode worker saw it; in `EndedRequest` of its sender, as that saw it."""

    pages: int
    bytes: int
    pages_reused: int
    """Pages of the prompt that the decode worker had in its own prefix cache."""
    wait_s: float
    """From granting the pages to committing them; of the sender, from the first page that it sent to the last."""
    exposed_s: float = 0.0
    """Of the writer's time for the transfer, what came after the prompt was computed."""


class FetchReport(msgspec.Struct, frozen=True, kw_only=True):
    """What became of bringing a prefix here before the prompt was computed."""

    peer: str
    """Incarnation that was asked."""
    pages: int
    """That came; 0 when none did, or not in time."""
    bytes: int
    wait_s: float
    """From asking until they could be used, or were no longer waited for."""


class CacheHits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Where the tokens of `cached_tokens` were found that did not lie on the device already."""

    host: int = 0
    """Copied back from host memory."""
    disk: int = 0
    """Read from files."""
    fetched: int = 0
    """Brought from another worker before the prompt was begun."""
    unusable: int = 0
    """Not among `cached_tokens`: tokens behind them that the cache had, too, and that were computed, because no state
    was kept, or pages of a window were gone, from which to continue there."""


class TokenOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """New tokens of one attempt. Idempotent: the receiver accepts position `index` only once."""

    rid: str
    index: int
    """Output position of `token_ids[0]`, counted from the start of the whole output (resume_ids included)."""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    """One per token when the request asked for logprobs."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """Of prompt tokens [logprob_start, prompt_len), with the first output of the worker that computed the prompt.
    None at position 0, which nothing predicts."""
    embedding: bytes | None = None
    """Little-endian float32 values, with the finish of a request that asked for pooling."""
    finish: Finish | None = None
    cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache of the worker that computed the prompt; with its first output, and
    again with the first output of the worker that it handed over to."""
    cache_hits: CacheHits | None = None
    """With `cached_tokens`, of workers that say so."""
    transfer: TransferReport | None = None
    """With the decode worker's first output."""
    fetch: FetchReport | None = None
    """With the first output of the worker that computed the prompt, if the request named a prefix to fetch."""
    queue_s: float | None = None
    """Receipt to first scheduled step, with the first output."""
    delay_s: float | None = None
    """Of `queue_s`, what it waited for the scheduling delay; with the first output, where it did."""
    adapter_wait_s: float | None = None
    """For how long it waited until its adapter was in memory; with the first output, where it did."""
    prefill_s: float | None = None
    """First scheduled step to first token, with the first output."""
    leaving: bool = False
    """The worker asks for this request to be continued elsewhere, with its KV (`Handoff.moving`). It continues here
    until then, so a gateway without a place for it need do nothing."""


class OutputBatch(msgspec.Struct, frozen=True, kw_only=True, tag="outputs"):
    """All outputs that one settled step has for one gateway."""

    outputs: tuple[TokenOutput, ...]


class Taken(msgspec.Struct, frozen=True, kw_only=True, tag="taken"):
    """The engine has accepted request `rid`: sent before the first step that may compute it. When the engine is lost
    after that, the request may be the reason."""

    rid: str


class Pong(msgspec.Struct, frozen=True, kw_only=True, tag="pong"):
    nonce: int
    incarnation: str


class TokenizerPart(msgspec.Struct, frozen=True, kw_only=True, tag="tokenizer_part"):
    """A part of the tokenizer's files (`tokenizer.bundle`)."""

    digest: str
    offset: int
    total: int
    """Bytes of all parts; 0 where the engine does not have what was requested."""
    data: bytes


EngineReply = OutputBatch | Taken | Pong | TokenizerPart
