"""Random arrivals, aborts and operators against random engines: no output depends on any of them."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum
from functools import partial

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem_engine.base.errors import BusyError, InvalidRequestError, SessionError, SessionLostError
from tandem_engine.base.names import RequestId
from tandem_engine.config import HostConfig, PreemptionMode, SchedulePolicy, WritePolicy
from tandem_engine.executor.interface import ModelExecutor
from tandem_engine.forward.batch import ForwardBatch
from tandem_engine.memory.cache_groups import Reach
from tandem_engine.messages.control import PauseMode
from tandem_engine.messages.outputs import FinishReason
from tandem_engine.messages.requests import GenerateRequest, SessionRef
from tandem_testing.fake_executors import Computes, EagerExecutor, LateExecutor
from tandem_testing.long_tests import examples
from tandem_testing.memory_storage import MemoryStorage
from tandem_testing.poisoned_states import poisoned
from tandem_testing.scheduler_builders import (
    VOCAB,
    Engine,
    FakeWindow,
    expected_output,
    expected_prompt_logprobs,
    make_engine,
    make_message,
)
from tandem_testing.scripted_proposer import ScriptedProposer, always_right, wrong_at_random, wrong_every
from tandem_testing.toy_grammar import ToyGrammars, toy_grammar

PREFIX = tuple(range(20, 38))
MISTAKES = (always_right, wrong_every(3), wrong_at_random(1))


@dataclass(frozen=True)
class Arrival:
    """A request, how many steps after the one before it comes, and when it is aborted, if at all."""

    message: GenerateRequest
    gap: int
    abort_after: int | None


class Order(Enum):
    """What an operator may ask for at any moment."""

    PAUSE = "pause"
    PUT_BACK = "put back"
    ABORT_ALL = "abort all"
    FLUSH = "flush"
    CLOSE_SESSION = "close session"


@dataclass(frozen=True)
class Plan:
    """What happens to an engine, and at which step."""

    arrivals: list[Arrival]
    orders: dict[int, Order]
    faults: frozenset[int] = frozenset()
    """Launched steps that raise, if more than one sequence is in them: alone twice in a row is a conviction."""

    def executor(self, model: Computes, *, overlap: bool) -> ModelExecutor:
        def fail(batch: ForwardBatch) -> None:
            if batch.step in self.faults and batch.num_sequences > 1:
                raise RuntimeError("by chance")

        return LateExecutor(model, fail) if overlap else EagerExecutor(model, fail)


@st.composite
def arrivals(draw: st.DrawFn) -> list[Arrival]:
    count = draw(st.integers(1, 7))
    return [draw(arrival(f"r{number}")) for number in range(count)]


def arrival(rid: str) -> st.SearchStrategy[Arrival]:
    own = st.lists(st.integers(1, 60), min_size=1, max_size=30)
    prompt = st.builds(lambda shared, tail: [*PREFIX[:shared], *tail], st.integers(0, len(PREFIX)), own)
    message = st.builds(
        make_message,
        st.just(rid),
        prompt,
        max_tokens=st.integers(1, 24),
        min_tokens=st.just(0),
        ignore_eos=st.booleans(),
        temperature=st.sampled_from([0.0, 1.0]),
        seed=st.integers(0, 3),
        stop=st.sampled_from([(), ("ab",), ("c", "dd")]),
        cache_salt=st.sampled_from(["", "tenant"]),
        priority=st.integers(0, 2),
        tenant=st.sampled_from(["a", "a", "b"]),
        repetition_penalty=st.sampled_from([1.0, 1.0, 2.0, 0.5]),
        presence_penalty=st.sampled_from([0.0, 0.0, 1.5]),
        frequency_penalty=st.sampled_from([0.0, 0.0, 0.5]),
        logit_bias=st.sampled_from([(), ((5, 4.0), (6, -4.0))]),
        bad_words=st.sampled_from([(), ((1,), (2, 3)), tuple((first, 9) for first in range(60))]),
        prompt_logprobs=st.sampled_from([None, None, 0, 2]),
        session=st.sampled_from([None, None, None, SessionRef(id="s"), SessionRef(id="s", turn=None)]),
        group=st.sampled_from(["", "", "choices"]),
        grammar=st.sampled_from([None, None, toy_grammar(every=3, length=9), toy_grammar(every=2, optional=3)]),
    )
    return st.builds(Arrival, message, st.integers(0, 6), st.none() | st.integers(0, 25))


plans = st.builds(
    Plan,
    arrivals(),
    st.dictionaries(st.integers(0, 40), st.sampled_from(Order), max_size=4),
    st.frozensets(st.integers(1, 60), max_size=4),
)
engines = st.fixed_dictionaries(
    {
        "enable_overlap": st.booleans(),
        "radix": st.booleans(),
        "page_size": st.sampled_from([1, 2, 4, 8]),
        "enable_mixed_chunk": st.booleans(),
        "chunked_prefill_size": st.sampled_from([1, 3, 7, 64]),
        "max_prefill_tokens": st.sampled_from([5, 16, 64]),
        "shared_prefill_tokens": st.sampled_from([0, 1, 6]),
        "max_running_requests": st.sampled_from([1, 2, 16]),
        "max_rows": st.sampled_from([2, 3, 16]),
        "init_new_token_ratio": st.sampled_from([0.1, 0.7]),
        "force_retract_every": st.sampled_from([0, 0, 1, 4]),
        "max_retractions": st.just(1000),
        "schedule_policy": st.sampled_from(SchedulePolicy),
        "priority_preemption_threshold": st.just(1),
        "max_tokens_per_step": st.sampled_from([0, 17, 40]),
        "long_prefill_token_threshold": st.sampled_from([0, 2]),
        "watermark": st.sampled_from([0.0, 0.1]),
        "grammars": st.builds(ToyGrammars, polls=st.integers(0, 2)),
        "proposer": st.none()
        | st.builds(ScriptedProposer, vocab_size=st.just(VOCAB), mistake=st.sampled_from(MISTAKES)),
        "session_pages": st.sampled_from([0, 2, 100]),
        "host_pages": st.sampled_from([0, 0, 3, 12, 100]),
        "preemption_mode": st.sampled_from([PreemptionMode.RECOMPUTE, PreemptionMode.SWAP]),
    }
)
tiers = st.fixed_dictionaries(
    {
        "write_policy": st.sampled_from(WritePolicy),
        "swap_bytes": st.sampled_from([0, 256, 1 << 20]),
    }
)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plan=plans, config=engines, tiers=tiers, stored=st.booleans(), spare=st.integers(0, 20))
def test_no_output_depends_on_arrivals_aborts_or_configuration(plan, config, tiers, stored, spare):
    longest = max(len(arrival.message.input_ids) + arrival.message.sampling.max_tokens for arrival in plan.arrivals)
    engine = make_engine(
        usable_pages=-(-longest // config["page_size"]) + spare,
        context_length=128,
        executor=partial(plan.executor, overlap=config["enable_overlap"]),
        host=HostConfig(enable_cache=config["radix"], **tiers),
        storage=MemoryStorage() if stored and config["radix"] else None,
        **config,
    )
    play(engine, plan)


WINDOWS = st.lists(st.tuples(st.sampled_from([1, 2, 3, 5, 8, 9, 17, 40]), st.integers(0, 12)), min_size=1, max_size=2)
"""Tokens, and pages beyond those without which no prompt could be computed."""


@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plan=plans, config=engines, windows=WINDOWS, spare=st.integers(0, 20))
def test_no_output_depends_on_the_memory_of_windows(plan, config, windows, spare):
    """Dropped pages are overwritten: one that a window still reads gives another token."""
    longest = max(len(arrival.message.input_ids) + arrival.message.sampling.max_tokens for arrival in plan.arrivals)
    page_size = config["page_size"]
    chunk = -(-min(config["chunked_prefill_size"], config["max_prefill_tokens"]) // page_size) + 1
    engine = make_engine(
        usable_pages=-(-longest // page_size) + spare,
        context_length=128,
        executor=partial(plan.executor, overlap=config["enable_overlap"]),
        windows=[
            FakeWindow(tokens=tokens, num_pages=1 + chunk + (Reach(tokens).max_blocks(page_size) or 0) + more)
            for tokens, more in windows
        ],
        **{**config, "host_pages": 0},
    )
    play(engine, plan)


def play(engine: Engine, plan: Plan) -> None:
    """Run `plan` to its end and check all that came of it. Pages that are given out are overwritten first, where no
    step that may still read them runs later."""
    at_once = isinstance(engine.executor, EagerExecutor)
    with poisoned(engine.memory, pages=engine.model.pool.bytes_view()) if at_once else nullcontext():
        Driver(engine, plan.orders).run(plan.arrivals)
    engine.scheduler.sessions.close("", "s")
    engine.scheduler.sessions.close("tenant", "s")
    engine.assert_nothing_held()
    for entry in plan.arrivals:
        check(engine, entry, aborted=entry.abort_after is not None or Order.ABORT_ALL in plan.orders.values())


class Driver:
    """Steps an engine through a plan."""

    def __init__(self, engine: Engine, orders: dict[int, Order]) -> None:
        self.engine = engine
        self.orders = orders
        self.aborts: list[tuple[int, str]] = []
        self.now = 0

    def run(self, arrivals: list[Arrival]) -> None:
        for entry in arrivals:
            self.advance(self.now + entry.gap)
            add(self.engine, entry.message)
            if entry.abort_after is not None:
                self.aborts.append((self.now + entry.abort_after, entry.message.rid))
        self.advance(self.now + 30)
        self.engine.run()

    def advance(self, until: int) -> None:
        while self.now < until:
            for _, rid in [due for due in self.aborts if due[0] == self.now]:
                self.engine.scheduler.abort(RequestId(rid))
            if self.now in self.orders:
                ORDERS[self.orders[self.now]](self.engine)
            self.engine.step()
            self.now += 1


def add(engine: Engine, message: GenerateRequest) -> None:
    """Remember all of a turn, which is what its output follows from."""
    try:
        whole = engine.scheduler.sessions.whole_turn(message)
    except InvalidRequestError:
        whole = message
    engine.add(message)
    engine.messages[message.rid] = msgspec.structs.replace(whole, session=message.session)


def pause(mode: PauseMode) -> Callable[[Engine], None]:
    def order(engine: Engine) -> None:
        engine.scheduler.pause(mode)
        engine.step(2)
        engine.scheduler.resume()

    return order


def flush(engine: Engine) -> None:
    engine.scheduler.stand_still()
    try:
        engine.scheduler.require_flushable()
    except BusyError:
        return
    engine.scheduler.forget_kv()


ORDERS: dict[Order, Callable[[Engine], None]] = {
    Order.PAUSE: pause(PauseMode.IN_PLACE),
    Order.PUT_BACK: pause(PauseMode.RETRACT),
    Order.ABORT_ALL: pause(PauseMode.ABORT),
    Order.FLUSH: flush,
    Order.CLOSE_SESSION: lambda engine: engine.scheduler.sessions.close("", "s"),
}


def check(engine: Engine, entry: Arrival, *, aborted: bool) -> None:
    rid = entry.message.rid
    message = engine.messages[rid]
    finish = engine.finish(rid)
    assert finish is not None, f"{rid} never ended"
    if finish.reason is FinishReason.ERROR:
        # A turn of a conversation that is not kept, is busy, or has become too long.
        assert message.session is not None
        assert finish.code in {InvalidRequestError.code, SessionError.code, SessionLostError.code}
        return
    expected = expected_output(message)
    got = engine.output(rid)
    if finish.reason is FinishReason.ABORT:
        assert aborted
        assert got == expected[: len(got)]
    else:
        assert finish.reason in {FinishReason.STOP, FinishReason.LENGTH}
        assert got == expected
        assert engine.received[rid].prompt_logprobs == expected_prompt_logprobs(message)
