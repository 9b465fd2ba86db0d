"""MockEngine: an engine's request socket without an engine.

It runs in a thread, speaks the real wire protocol and answers deterministically, so that a
prompt determines the whole stream. Knobs make it late, silent, wrong or dead.
"""

import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from tandem_engine.config import Role
from tandem_engine.ipc.channels import IpcContext, RouterChannel
from tandem_engine.messages.outputs import (
    CacheHits,
    EngineReply,
    Finish,
    FinishReason,
    OutputBatch,
    Pong,
    Taken,
    TokenLogprob,
    TokenOutput,
    TransferReport,
)
from tandem_engine.messages.requests import (
    AbortRequest,
    CloseSession,
    EngineRequest,
    GenerateRequest,
    HandoffSide,
    Ping,
    TokenizerRequest,
)
from tandem_engine.tokenizer.bundle import TokenizerBundle, tokenizer_part
from tandem_services.router.decision import WorkerView

WAIT_S = 60.0


def hash_tokens(first: int, count: int) -> Callable[[GenerateRequest, int], int]:
    """Token at a position as a function of prompt, seed and position: `count` ids from `first` on."""

    def token(request: GenerateRequest, position: int) -> int:
        text = f"{request.input_ids}|{request.sampling.seed}|{position}".encode()
        return first + int.from_bytes(blake2b(text, digest_size=4).digest()) % count

    return token


def scripted_tokens(ids: Sequence[int]) -> Callable[[GenerateRequest, int], int]:
    """The same output whatever the prompt. Must be longer than what is asked for, or end with EOS."""
    return lambda _, position: ids[position]


def prompt_logprobs(request: GenerateRequest) -> tuple[TokenLogprob | None, ...] | None:
    """Those of position i are −i, of rank i; alternatives follow the token's own id."""
    sampling = request.sampling
    if sampling.prompt_logprobs is None:
        return None
    scores = [
        TokenLogprob(
            logprob=-float(position),
            top=tuple((token + n, -n / 8) for n in range(sampling.prompt_logprobs)),
            rank=position,
        )
        for position, token in enumerate(request.input_ids)
    ]
    return (None, *scores[1:])[sampling.logprob_start :]


@dataclass(kw_only=True)
class MockBehavior:
    """What the engine does. May be changed while it runs."""

    token: Callable[[GenerateRequest, int], int]
    eos: int | None = None
    tokens_per_output: int = 1
    step_s: float = 0.0
    """Pause before each step."""
    cached_tokens: int = 4
    queue_s: float = 0.001
    delay_s: float | None = None
    """Of that, for the scheduling delay."""
    cache_hits: CacheHits | None = None
    """Where they were; as workers of older releases it does not say."""
    hold_at: int | None = None
    """A request that has so many tokens gets no more until this is raised; one that only sends its KV is not held."""
    die_after: int | None = None
    """Close the socket after this many output tokens in all. Outputs before are received."""
    dies_of: tuple[int, ...] | None = None
    """Close the socket on a request with this prompt, once its acceptance was sent. That is received."""
    refuse: Finish | None = None
    """Answer every request with this finish at once."""
    fail_after: tuple[int, Finish] | None = None
    """Answer with this finish once a request has so many tokens."""
    leave_after: int | None = None
    """Ask to be left once a request has so many tokens; with each output from then on."""
    deaf: bool = False
    """Read nothing, not even pings."""
    mute: bool = False
    """Answer pings and nothing else, like an engine with a long queue."""
    first_token_gate: threading.Event | None = None
    """A prefill side sends its first token only once this is set."""
    strays: bool = False
    """Send outputs of an unknown request as well."""
    awaits_handoff: bool = True
    """A decode side starts only once the prefill side has sent its first token."""
    skip_first: bool = False
    """A decode side does not repeat the first token."""


@dataclass(kw_only=True)
class _Running:
    client: bytes
    request: GenerateRequest
    position: int
    first: bool = True
    remaining: int = 0


@dataclass(kw_only=True, eq=False)
class MockEngine:
    """Start with `start`, end with `stop`. Attributes may be read from any thread."""

    context: IpcContext
    worker_id: str
    behavior: MockBehavior
    role: Role = Role.BOTH
    model: str = "mock"
    context_length: int = 512
    handed_over: set[str] = field(default_factory=set)
    """Rooms whose first token was sent; to be shared by the engines of one fleet."""
    received: list[GenerateRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    closed_sessions: list[str] = field(default_factory=list)
    emitted: int = 0
    """Output tokens sent to all clients."""
    pings: int = 0
    tokenizer: TokenizerBundle | None = None
    """That it sends to gateways."""
    send_malformed: bool = False
    """Answer pings with bytes that are no message."""

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._running: dict[str, _Running] = {}
        self._channel: RouterChannel[EngineRequest, EngineReply] = RouterChannel(
            self.context, "127.0.0.1", 0, inbound=EngineRequest, outbound=EngineReply
        )
        self._thread = threading.Thread(target=self._serve, name=self.worker_id, daemon=True)

    @property
    def view(self) -> WorkerView:
        return WorkerView(
            worker_id=self.worker_id,
            incarnation=f"{self.worker_id}@1",
            role=self.role,
            request_endpoint=self._channel.endpoint,
            peer_endpoint="tcp://127.0.0.1:1",
            compat_hash="mock",
            context_length=self.context_length,
            page_size=16,
            model=self.model,
            tokenizer="" if self.tokenizer is None else self.tokenizer.digest,
            encoding="" if self.tokenizer is None else self.tokenizer.encoding,
        )

    def start(self) -> "MockEngine":
        self._thread.start()
        return self

    def stop(self) -> None:
        """As SIGKILL: the socket closes, nothing is sent."""
        self._stopping.set()
        self._thread.join(WAIT_S)

    @property
    def running(self) -> int:
        return len(self._running)

    def wait_until(self, condition: Callable[[], bool]) -> bool:
        """Wait, in any thread, until something the engine saw makes `condition` true."""
        with self._changed:
            return self._changed.wait_for(condition, WAIT_S)

    def wait_for_pings(self, count: int) -> bool:
        """Wait for `count` more pings."""
        enough = self.pings + count
        return self.wait_until(lambda: self.pings >= enough)

    def _serve(self) -> None:
        try:
            while not self._stopping.is_set():
                self._channel.socket.poll(0 if self._busy() else 5)
                if self.behavior.deaf:
                    self._stopping.wait(0.005)
                    continue
                for client, message in self._channel.receive():
                    self._take(client, message)
                if self._busy() and not self._dying():
                    self._step()
                if self._dying():
                    # Closed at once, the socket would lose what its thread has had no time to send: by chance.
                    self._channel.drain(WAIT_S)
                    return
        finally:
            self._channel.close()

    def _dying(self) -> bool:
        """Whether it has sent all that it is to send, or has taken in what it dies of."""
        die_after = self.behavior.die_after
        if die_after is not None and self.emitted >= die_after:
            return bool(self.emitted or self._running)
        return any(running.request.input_ids == self.behavior.dies_of for running in self._running.values())

    def _busy(self) -> bool:
        return not (self.behavior.mute or self.behavior.deaf) and any(map(self._may_step, self._running.values()))

    def _take(self, client: bytes, message: EngineRequest) -> None:
        with self._changed:
            if isinstance(message, Ping):
                self.pings += 1
                self._answer_ping(client, message)
            elif isinstance(message, AbortRequest):
                self.aborted.append(message.rid)
                self._running.pop(message.rid, None)
            elif isinstance(message, TokenizerRequest):
                self._channel.send(client, tokenizer_part(self.tokenizer, message))
            elif isinstance(message, CloseSession):
                self.closed_sessions.append(message.session)
            else:
                self.received.append(message)
                self._channel.send(client, Taken(rid=message.rid))
                self._accept(client, message)
            self._changed.notify_all()

    def _answer_ping(self, client: bytes, ping: Ping) -> None:
        if self.send_malformed:
            self._channel.socket.send_multipart((client, b"\x00rubbish"))
        else:
            self._channel.send(client, Pong(nonce=ping.nonce, incarnation=self.view.incarnation))

    def _asks_to_be_left(self, running: _Running) -> bool:
        alone = running.request.handoff is None or running.request.handoff.side is HandoffSide.RECEIVE
        return alone and self.behavior.leave_after is not None and running.position >= self.behavior.leave_after

    def _accept(self, client: bytes, request: GenerateRequest) -> None:
        start = len(request.resume_ids)
        if self.behavior.refuse is not None:
            output = TokenOutput(rid=request.rid, index=start, finish=self.behavior.refuse)
            self._channel.send(client, OutputBatch(outputs=(output,)))
            return
        sends = request.handoff is not None and request.handoff.side is HandoffSide.SEND
        receives = request.handoff is not None and request.handoff.side is HandoffSide.RECEIVE
        skipped = int(receives and self.behavior.skip_first)
        self._running[request.rid] = _Running(
            client=client,
            request=request,
            position=start + skipped,
            remaining=1 if sends else request.sampling.max_tokens - start,
        )

    def _step(self) -> None:
        if self.behavior.step_s:
            time.sleep(self.behavior.step_s)
        batches: dict[bytes, list[TokenOutput]] = {}
        for running in list(self._running.values()):
            if self._may_step(running):
                outputs = batches.setdefault(running.client, [])
                if self.behavior.strays:
                    outputs.append(TokenOutput(rid="nobody", index=0, token_ids=(5,)))
                if self._asks_to_be_left(running):
                    outputs.append(TokenOutput(rid=running.request.rid, index=running.position, leaving=True))
                outputs.append(self._advance(running))
        for client, outputs in batches.items():
            self._channel.send(client, OutputBatch(outputs=tuple(outputs)))
        with self._changed:
            self.handed_over.update(output.rid for outputs in batches.values() for output in outputs)
            self._changed.notify_all()

    def _may_step(self, running: _Running) -> bool:
        handoff, gate, hold_at = running.request.handoff, self.behavior.first_token_gate, self.behavior.hold_at
        if handoff is not None and handoff.side is HandoffSide.SEND:
            return gate is None or gate.is_set()
        if hold_at is not None and running.position >= hold_at:
            return False
        return handoff is None or handoff.room in self.handed_over or not self.behavior.awaits_handoff

    def _advance(self, running: _Running) -> TokenOutput:
        request, start = running.request, running.position
        ids: list[int] = []
        finish = self._failure(running)
        while finish is None and len(ids) < self.behavior.tokens_per_output and running.remaining:
            ids.append(self.behavior.token(request, running.position))
            running.position += 1
            running.remaining -= 1
            finish = self._finish(request, running.position, ids[-1])
        self.emitted += len(ids)
        first, running.first = running.first, False
        if finish is not None or not running.remaining:
            del self._running[request.rid]
        return self._output(request, start, ids, finish, first=first)

    def _failure(self, running: _Running) -> Finish | None:
        if self.behavior.fail_after is None:
            return None
        tokens, finish = self.behavior.fail_after
        return finish if running.position >= tokens else None

    def _finish(self, request: GenerateRequest, length: int, token: int) -> Finish | None:
        if token == self.behavior.eos and not request.sampling.ignore_eos:
            return Finish(reason=FinishReason.STOP)
        if token in request.sampling.stop_token_ids:
            return Finish(reason=FinishReason.STOP, matched_stop=token)
        return Finish(reason=FinishReason.LENGTH) if length >= request.sampling.max_tokens else None

    def _output(
        self, request: GenerateRequest, start: int, ids: list[int], finish: Finish | None, *, first: bool
    ) -> TokenOutput:
        receives = request.handoff is not None and request.handoff.side is HandoffSide.RECEIVE
        transfer = TransferReport(pages=3, bytes=3 << 14, pages_reused=1, wait_s=0.002)
        return TokenOutput(
            rid=request.rid,
            index=start,
            token_ids=tuple(ids),
            logprobs=self._logprobs(request, ids),
            prompt_logprobs=prompt_logprobs(request) if first and not receives else None,
            embedding=_vector(request) if request.pooling is not None and finish is not None else None,
            finish=finish,
            cached_tokens=self.behavior.cached_tokens if first else None,
            cache_hits=self.behavior.cache_hits if first else None,
            transfer=transfer if first and receives else None,
            queue_s=self.behavior.queue_s if first else None,
            delay_s=self.behavior.delay_s if first else None,
            prefill_s=0.002 if first and not receives else None,
        )

    def _logprobs(self, request: GenerateRequest, ids: list[int]) -> tuple[TokenLogprob, ...] | None:
        top = request.sampling.logprobs
        if top is None:
            return None
        if named := request.sampling.logprob_token_ids:
            return tuple(TokenLogprob(logprob=-0.5, top=tuple((token, -1.0 - token) for token in named)) for _ in ids)
        return tuple(TokenLogprob(logprob=-0.5, top=tuple((i + rank, -0.5 - rank) for rank in range(top))) for i in ids)


def mock_vector(input_ids: Sequence[int], dimensions: int | None = None) -> list[float]:
    """What a mock engine answers to a request for an embedding: quarters, which float32 holds exactly."""
    whole = [sum(input_ids) / 4, len(input_ids) / 4, input_ids[0] / 4]
    return whole[:dimensions]


def _vector(request: GenerateRequest) -> bytes:
    assert request.pooling is not None, f"{request.rid} wants no embedding"
    values = mock_vector(request.input_ids, request.pooling.dimensions)
    return struct.pack(f"<{len(values)}f", *values)
