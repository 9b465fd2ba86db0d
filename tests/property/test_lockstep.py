"""Two ranks' schedulers plan the same batches, whatever the pace and the clock of each."""

from collections import deque
from dataclasses import dataclass, field, fields

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem_engine.config import SchedulePolicy
from tandem_engine.messages.control import AbortRequests, Drain
from tandem_engine.messages.outputs import FinishReason
from tandem_engine.parallel.agreement import Agreement
from tandem_engine.parallel.group import FirstFailure
from tandem_engine.parallel.inputs import Add, Input
from tandem_engine.scheduler.lockstep import AgreedInputs
from tandem_testing.fake_executors import EagerExecutor, LateExecutor
from tandem_testing.long_tests import examples
from tandem_testing.scheduler_builders import Engine, ManualClock, make_engine, make_message

SHARED = tuple(range(20, 38))


@dataclass
class Mail:
    """A `TpGroup` of two in one thread: rank 1 reads what rank 0 has sent when it likes."""

    rank: int
    sent: deque[torch.Tensor]
    size: int = 2

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.rank == 0:
            self.sent.append(tensor.clone())
            return tensor
        return tensor.copy_(self.sent.popleft())


@dataclass
class Rank:
    """One rank's scheduler and its way in."""

    engine: Engine
    inputs: AgreedInputs
    running: bool = True
    idle_log: list[bool] = field(default_factory=list)

    def turn(self) -> None:
        self.running = self.inputs.begin_turn()
        if self.running:
            self.engine.scheduler.step()
            self.idle_log.append(self.engine.scheduler.idle)


def make_rank(rank: int, sent: deque[torch.Tensor], executor: type, config: dict[str, object]) -> Rank:
    engine = make_engine(executor=executor, **config)
    inputs = AgreedInputs(
        scheduler=engine.scheduler,
        agreement=Agreement(Mail(rank, sent)),
        clock=engine.clock,
        local_clock=ManualClock(),
        rank=rank,
        failure=FirstFailure(),
    )
    return Rank(engine=engine, inputs=inputs)


def message(number: int, shared: int, own: list[int], deadline_s: float | None, **options: object) -> Add:
    request = make_message(f"r{number}", [*SHARED[:shared], *own], deadline_s=deadline_s, **options)
    return Add(message=request, client=b"even" if number % 2 == 0 else b"odd")


adds = st.builds(
    message,
    st.integers(0, 9),
    st.integers(0, len(SHARED)),
    st.lists(st.integers(1, 60), min_size=1, max_size=30),
    st.none() | st.floats(0.5, 8.0),
    max_tokens=st.integers(1, 24),
    ignore_eos=st.booleans(),
    temperature=st.sampled_from([0.0, 1.0]),
    priority=st.integers(0, 2),
    tenant=st.sampled_from(["a", "b", "c"]),
)
inputs = st.one_of(
    adds,
    adds,
    adds,
    st.builds(lambda number: AbortRequests(rid=f"r{number}"), st.integers(0, 9)),
    st.sampled_from([AbortRequests(rid=None, client=b"odd"), AbortRequests(rid=None), Drain()]),
)


@dataclass(frozen=True)
class Moment:
    """What happens to rank 0 before one of its turns, and how far the other rank gets afterwards."""

    submitted: list[Input]
    seconds: float
    follower_turns: int


moments = st.builds(
    Moment, st.lists(inputs, max_size=2), st.sampled_from([0.0, 0.5, 2.0]), st.sampled_from([0, 0, 1, 1, 2, 5])
)
configs = st.fixed_dictionaries(
    {
        "enable_overlap": st.booleans(),
        "page_size": st.sampled_from([1, 4, 8]),
        "enable_mixed_chunk": st.booleans(),
        "chunked_prefill_size": st.sampled_from([3, 7, 64]),
        "max_prefill_tokens": st.sampled_from([16, 64]),
        "shared_prefill_tokens": st.sampled_from([0, 2, 8]),
        "max_running_requests": st.sampled_from([2, 16]),
        "usable_pages": st.sampled_from([40, 120]),
        "init_new_token_ratio": st.sampled_from([0.1, 0.7]),
        "force_retract_every": st.sampled_from([0, 4]),
        "schedule_policy": st.sampled_from(SchedulePolicy),
        "policy_ageing_seconds": st.sampled_from([1.0, 60.0]),
    }
)


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(moments, min_size=4, max_size=25), configs)
def test_ranks_launch_the_same_steps_however_late_one_of_them_is(script, config):  # [least-of-ranks] [same-collectives]
    sent: deque[torch.Tensor] = deque()
    # One computes as early, the other as late as can be: anything a plan read from timing would differ.
    leader = make_rank(0, sent, EagerExecutor, config)
    follower = make_rank(1, sent, LateExecutor, config)
    follower.inputs.local_clock.time = 1e6
    for moment in script:
        for item in moment.submitted:
            leader.inputs.submit(item)
        leader.inputs.local_clock.time += moment.seconds
        leader.turn()
        for _ in range(min(moment.follower_turns, len(sent))):
            follower.turn()
    for _ in range(5000):
        if leader.engine.scheduler.idle:
            break
        leader.turn()
    leader.inputs.stop()
    while follower.running:
        follower.turn()
    assert not sent
    assert_same_steps(leader, follower)
    leader.engine.assert_nothing_held()
    follower.engine.assert_nothing_held()


def assert_same_steps(leader: Rank, follower: Rank) -> None:
    assert leader.idle_log == follower.idle_log
    mine, theirs = leader.engine.executor.batches, follower.engine.executor.batches
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        for part in fields(a):
            value, other = getattr(a, part.name), getattr(b, part.name)
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, other), f"step {a.step}: {part.name}"
        assert (a.step, a.mode, a.num_extend) == (b.step, b.mode, b.num_extend)
    assert outcomes(leader.engine) == outcomes(follower.engine)


def outcomes(engine: Engine) -> dict[str, tuple[list[int], FinishReason | None]]:
    return {
        rid: (received.tokens, received.outputs[-1].finish and received.outputs[-1].finish.reason)
        for rid, received in engine.received.items()
    }
