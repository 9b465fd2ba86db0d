"""A scheduler over the fake model, what its clients saw, and what they should have seen."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tandem_engine.config import HostConfig, SchedulerConfig
from tandem_engine.executor.interface import ModelExecutor
from tandem_engine.memory.cache_groups import Reach
from tandem_engine.memory.host.memory import HostMemory
from tandem_engine.memory.host.pages import HostPool
from tandem_engine.memory.host.storage import HostStorage
from tandem_engine.memory.kv_memory import KvMemory
from tandem_engine.memory.page_copies import CopyQueue, parts_of_state
from tandem_engine.memory.pool import KvPool
from tandem_engine.memory.prefix_cache import NoPrefixCache
from tandem_engine.memory.state_anchors import StateAnchors
from tandem_engine.memory.window_pages import WindowPages
from tandem_engine.messages.outputs import Finish, TokenLogprob, TokenOutput
from tandem_engine.messages.requests import AdapterRef, GenerateRequest, Handoff, PrefixFetch, SessionRef, TraceContext
from tandem_engine.messages.sampling import SamplingParams
from tandem_engine.parallel.agreement import Least
from tandem_engine.sampling.grammar.compiler import Grammars
from tandem_engine.scheduler.scheduler import Scheduler
from tandem_engine.scheduler.speculation import Speculation
from tandem_engine.scheduler.stop import DecodeText, ModelFacts
from tandem_engine.speculative.adaptive_length import DraftLengths, TurnTimer
from tandem_engine.speculative.interface import Proposer
from tandem_engine.speculative.verify import ChainVerifier, VerifiedForward
from tandem_testing.fake_executor import (
    HIDDEN_SIZE,
    FakeModel,
    WindowLayer,
    make_fake_pool,
    next_token,
    prompt_logprob,
    ramp,
)
from tandem_testing.fake_executors import Computed, EagerExecutor, LateExecutor
from tandem_testing.fake_states import FakeStates
from tandem_testing.memory_builders import make_memory
from tandem_testing.plain_reasoning import allowed_after, answer_of
from tandem_testing.plain_sampling import edited_logits, most_likely_token
from tandem_testing.toy_grammar import ToyGrammars, toy_rule

POISON = -7
"""In the place of a token and of a position."""

VOCAB = 97
EOS = 0


class ManualClock:
    """Time that moves on demand."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time


def decode_text(ids: Sequence[int]) -> str:
    """Each token is one letter, so stop strings are easy to write down."""
    return "".join(chr(ord("a") + token % 26) for token in ids)


ADAPTER = AdapterRef(name="sql", digest=bytes(range(16)))
"""One that every engine here has loaded. The fake model computes the same tokens with it."""


def make_message(
    rid: str = "r",
    prompt: Sequence[int] = (1, 2, 3),
    *,
    max_tokens: int = 8,
    resume: Sequence[int] = (),
    handoff: Handoff | None = None,
    fetch: PrefixFetch | None = None,
    cache_salt: str = "",
    adapter: AdapterRef | None = None,
    priority: int = 0,
    tenant: str = "",
    group: str = "",
    session: SessionRef | None = None,
    deadline_s: float | None = None,
    trace: TraceContext | None = None,
    ignore_eos: bool = True,
    **sampling: object,
) -> GenerateRequest:
    """A greedy request that runs to max_tokens unless told otherwise."""
    params = {"temperature": 0.0, "ignore_eos": ignore_eos, "max_tokens": max_tokens, **sampling}
    return GenerateRequest(
        rid=rid,
        input_ids=tuple(prompt),
        sampling=SamplingParams(**params),
        resume_ids=tuple(resume),
        handoff=handoff,
        fetch=fetch,
        cache_salt=cache_salt,
        adapter=adapter,
        priority=priority,
        tenant=tenant,
        group=group,
        session=session,
        deadline_s=deadline_s,
        trace=trace,
    )


def expected_output(message: GenerateRequest, *, context_length: int = 10**9) -> list[int]:
    """The whole output, computed the plain way: one token at a time from the full history."""
    sampling = message.sampling
    outputs = list(message.resume_ids)
    while not _ended(sampling, len(message.input_ids), outputs, len(message.resume_ids), context_length):
        history = [*message.input_ids, *outputs]
        noise = None if sampling.greedy else (sampling.seed, len(history))
        suppress = _suppressed(sampling, outputs)
        masked = _masked(sampling, outputs)
        if not sampling.edits_logits:
            outputs.append(next_token(history, vocab_size=VOCAB, noise=noise, suppress={*suppress, *masked}))
            continue
        logits = ramp(next_token(history, vocab_size=VOCAB, noise=noise), VOCAB).tolist()
        edited = edited_logits(
            logits, sampling, prompt=message.input_ids, outputs=outputs, suppress=suppress, masked=masked
        )
        outputs.append(most_likely_token(edited))
    return outputs


def _suppressed(sampling: SamplingParams, outputs: Sequence[int]) -> set[int]:
    if len(outputs) >= sampling.min_tokens:
        return set()
    return {*sampling.stop_token_ids, *(() if sampling.ignore_eos else (EOS,))}


def _masked(sampling: SamplingParams, outputs: Sequence[int]) -> set[int]:
    """Tokens that its reasoning budget and its grammar forbid after `outputs`."""
    rule = None if sampling.grammar is None else toy_rule(sampling.grammar).allowed
    allowed = allowed_after(sampling.reasoning_budget, outputs, rule, vocab_size=VOCAB, eos=EOS)
    return {*range(VOCAB)} - allowed


def expected_prompt_logprobs(message: GenerateRequest) -> list[float | None] | None:
    """Of positions from `logprob_start` on; None when it was not requested."""
    if message.sampling.prompt_logprobs is None:
        return None
    prompt, start = message.input_ids, message.sampling.logprob_start
    scores = [None, *(prompt_logprob(prompt[:position], prompt[position]) for position in range(1, len(prompt)))]
    return scores[start:]


def _ended(sampling: SamplingParams, prompt_len: int, outputs: list[int], resumed: int, context_length: int) -> bool:
    if len(outputs) >= sampling.max_tokens or prompt_len + len(outputs) >= context_length:
        return True
    answer = answer_of(sampling.reasoning_budget, outputs, constrained=sampling.grammar is not None)
    if sampling.grammar is not None and answer is not None and toy_rule(sampling.grammar).ended(answer):
        return True
    if len(outputs) == resumed or len(outputs) <= sampling.min_tokens:
        return False
    if (outputs[-1] == EOS and not sampling.ignore_eos) or outputs[-1] in sampling.stop_token_ids:
        return True
    return any(decode_text(outputs).endswith(stop) for stop in sampling.stop)


@dataclass(frozen=True, kw_only=True)
class FakeWindow:
    """A further group of layers, which see the newest `tokens`."""

    tokens: int
    num_pages: int

    def build(self, *, page_ids: int, page_size: int) -> tuple[WindowPages, KvPool]:
        """Its pages are overwritten when they are dropped: a step that still reads one gives a wrong token."""
        pool = make_fake_pool(num_pages=self.num_pages, page_size=page_size)

        def poison(pages: Sequence[int]) -> None:
            pool.data[list(pages)] = POISON

        pages = WindowPages(
            Reach(self.tokens), page_size=page_size, num_pages=self.num_pages, page_ids=page_ids, dropped=poison
        )
        return pages, pool


@dataclass(kw_only=True)
class Received:
    """What a client saw of one request."""

    outputs: list[TokenOutput] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """New tokens in the order in which they came."""
        return [token for output in self.outputs for token in output.token_ids]

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return [logprob for output in self.outputs for logprob in output.logprobs or ()]

    @property
    def prompt_logprobs(self) -> list[float | None] | None:
        """As they came; more than once is a bug."""
        came = [output.prompt_logprobs for output in self.outputs if output.prompt_logprobs is not None]
        assert len(came) <= 1, f"prompt logprobs came {len(came)} times"
        return [entry and entry.logprob for entry in came[0]] if came else None

    @property
    def finish(self) -> Finish | None:
        finishes = [output.finish for output in self.outputs if output.finish is not None]
        assert len(finishes) <= 1, f"told {len(finishes)} times that it finished"
        assert not finishes or self.outputs[-1].finish is not None, "output after the end"
        return finishes[0] if finishes else None

    def whole_output(self, message: GenerateRequest) -> list[int]:
        """Resumed and new tokens; checks that positions are contiguous, without gap or double."""
        whole = list(message.resume_ids)
        for output in self.outputs:
            assert output.index == len(whole), f"output at {output.index}, {len(whole)} tokens were there"
            whole += output.token_ids
        return whole


@dataclass(kw_only=True)
class Engine:
    """A scheduler and all that a test wants to touch."""

    scheduler: Scheduler
    memory: KvMemory
    model: FakeModel
    executor: ModelExecutor
    clock: ManualClock
    received: dict[str, Received]
    deliveries: list[tuple[bytes, tuple[TokenOutput, ...]]]
    messages: dict[str, GenerateRequest] = field(default_factory=dict)

    def add(self, message: GenerateRequest, client: bytes = b"") -> None:
        self.messages[message.rid] = message
        self.scheduler.add(message, client)

    def run(self, max_steps: int = 5000) -> None:
        """Step until idle; a scheduler that stands still with work left has hung."""
        still = 0
        for _ in range(max_steps):
            if self.scheduler.idle:
                return
            still = 0 if self.scheduler.step() else still + 1
            assert still < 3, f"no progress with {len(self.scheduler.queues.requests)} requests left"
        raise AssertionError(f"not idle after {max_steps} steps")

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.scheduler.step()

    def output(self, rid: str = "r") -> list[int]:
        """Tokens that the client has, resumed ones included."""
        return self.received[rid].whole_output(self.messages[rid])

    def finish(self, rid: str = "r") -> Finish | None:
        return self.received[rid].finish if rid in self.received else None

    def assert_expected(self, *rids: str) -> None:
        """The outputs of `rids` (all, if none are named) are what the plain computation gives."""
        for rid in rids or self.messages:
            message = self.messages[rid]
            assert self.output(rid) == expected_output(message), rid
            assert self.received[rid].prompt_logprobs == expected_prompt_logprobs(message), rid

    def assert_nothing_held(self) -> None:
        """Idle, nothing leaked: all pages are free or in the tree, all rows are free, no host block is pinned."""
        report = self.scheduler.audit()
        assert report.problems == ()
        assert (report.private, report.requests, report.fenced, report.host.swapped) == (0, 0, 0, 0)
        host = self.memory.host
        if host is not None and self.memory.copies.idle and not any(block.loading for block in host.tier.blocks):
            pinned = [block.digest.hex() for block in host.tier.blocks if block.pins]
            assert not pinned or host.tier.traffic is not None, f"blocks {pinned} are pinned by nobody"


def make_engine(
    *,
    page_size: int = 4,
    usable_pages: int = 64,
    num_layers: int = 1,
    num_kv_heads: int = 1,
    radix: bool = True,
    max_rows: int = 16,
    context_length: int = 256,
    executor: Callable[[FakeModel], ModelExecutor] | None = None,
    with_text: bool = True,
    proposer: Proposer | None = None,
    adaptive: bool = False,
    num_draft_tokens: int = 4,
    max_draft_batch: int = 0,
    session_pages: int = 0,
    host_pages: int = 0,
    host: HostConfig | None = None,
    storage: HostStorage | None = None,
    grammars: Grammars | None = None,
    least: Least | None = None,
    windows: Sequence[FakeWindow] = (),
    anchors: int | None = None,
    **config: object,
) -> Engine:
    """An audited engine that follows toy grammars. In overlap mode forwards run as late as can be, unless an executor
    is given.

    With a proposer it speculates, in chains as long as can be unless `adaptive`. `host_pages` of host memory are used
    as `host` says. `windows`: of further groups of layers. `anchors`: so many, next to the states of a further layer.
    """
    settings = {"audit_every_step": True, "enable_overlap": False, "enable_mixed_chunk": False, **config}
    scheduler_config = SchedulerConfig(context_length=context_length, **settings)
    pool = make_fake_pool(
        num_pages=usable_pages + 1, page_size=page_size, num_layers=num_layers, num_kv_heads=num_kv_heads
    )
    host_pool = HostPool(num_pages=host_pages, page_bytes=pool.page_bytes) if host_pages else None
    states = None if anchors is None else FakeStates(rows=max_rows, anchors=anchors)
    state_anchors = None
    if states is not None and radix:
        state_anchors = StateAnchors(states.anchor_slots, page_size=page_size, slot_bytes=states.page_bytes)
    window_pages = [window.build(page_ids=usable_pages + 1, page_size=page_size) for window in windows]
    model = FakeModel(
        pool=pool,
        vocab_size=VOCAB,
        host_pool=host_pool,
        states=states,
        windows=[
            WindowLayer(tokens=each.tokens, pool=layer) for each, (_, layer) in zip(windows, window_pages, strict=True)
        ],
    )
    make_executor = executor or (LateExecutor if scheduler_config.enable_overlap else EagerExecutor)
    verified = VerifiedForward(model=model, verifier=ChainVerifier())
    built = make_executor(model if proposer is None else Computed(forward=verified.forward, copy=model.copy))
    copies = CopyQueue(submit=built.copy)
    host_memory = None
    if host_pool is not None:
        host_memory = HostMemory.build(
            host_pool,
            copies,
            host or HostConfig(),
            page_size=page_size,
            storage=storage,
            state_pages=0 if states is None else parts_of_state(states.page_bytes, pool.page_bytes),
            anchors=state_anchors,
        )
    memory = make_memory(
        page_size=page_size,
        usable_pages=usable_pages,
        max_rows=max_rows,
        max_pages=context_length // page_size + 2,
        cache=None if radix else NoPrefixCache(),
        copies=copies,
        host=host_memory,
        windows=[pages for pages, _ in window_pages],
        anchors=state_anchors,
        stateful=states is not None,
    )
    received: dict[str, Received] = {}
    deliveries: list[tuple[bytes, tuple[TokenOutput, ...]]] = []

    def sink(client: bytes, outputs: tuple[TokenOutput, ...]) -> None:
        deliveries.append((client, outputs))
        for output in outputs:
            received.setdefault(output.rid, Received()).outputs.append(output)

    clock = ManualClock()
    speculation = proposer and Speculation(
        proposer=proposer,
        lengths=DraftLengths(longest=num_draft_tokens, adaptive=adaptive),
        max_batch=max_draft_batch,
        memory=memory,
        stopwatch=clock,
        timer=TurnTimer(clock=clock, catches_up=proposer.writes_kv),
        confined=False,
    )
    text: DecodeText | None = decode_text if with_text else None
    scheduler = Scheduler(
        memory=memory,
        executor=built,
        config=scheduler_config,
        model=ModelFacts(
            vocab_size=VOCAB,
            eos_token_ids=frozenset({EOS}),
            context_length=context_length,
            hidden_size=HIDDEN_SIZE,
            adapter_slots={ADAPTER.digest: 0},
        ),
        clock=clock,
        sink=sink,
        decode_text=text,
        speculation=speculation,
        session_pages=session_pages,
        grammars=grammars or ToyGrammars(),
        least=least,
    )
    return Engine(
        scheduler=scheduler,
        memory=memory,
        model=model,
        executor=built,
        clock=clock,
        received=received,
        deliveries=deliveries,
    )
