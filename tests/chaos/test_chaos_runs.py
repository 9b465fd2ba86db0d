"""A run of a scenario: it forces its fault, and measures what the machine reaches without one."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from tandem_testing.chaos.fleet import Fleet, Shape
from tandem_testing.chaos.machine import Slowness
from tandem_testing.chaos.runner import Runner
from tandem_testing.chaos.scenario import MAX_ROUNDS, Run, Scale
from tandem_testing.chaos.streams import Answer, Ask, ChoiceText, Kind
from tandem_testing.redis_server import RedisServer


@dataclass(kw_only=True)
class PlayedLoad:
    """Every ask is answered at once, its first word `silence_s` after it was sent."""

    silence_s: float = 0.0
    sent: list[Ask] = field(default_factory=list)
    finished: bool = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    def send(self, wanted: Sequence[Ask]) -> None:
        self.sent += wanted

    async def gathered(self) -> list[Answer]:
        return [answer_to(ask, began=Run.now(), silence_s=self.silence_s) for ask in self.sent]


def answer_to(ask: Ask, *, began: float, silence_s: float) -> Answer:
    choice = ChoiceText(text="a", tokens=["a"], logprobs=[-0.5], finishes=["length"])
    usage = {"completion_tokens": 1}
    return Answer(ask=ask, began=began, received_at=[began + silence_s], choices={0: choice}, usage=usage)


class Agreeing:
    """A reference that answers as the fleet did."""

    async def answers(self, wanted: Sequence[Ask]) -> list[Answer]:
        return [answer_to(ask, began=0.0, silence_s=0.0) for ask in wanted]


def run_with(load: PlayedLoad, folder) -> Run:
    class PlayedRun(Run):
        def load(self, gateways: int | None = None) -> PlayedLoad:
            return load

        async def settled(self, timeout_s: float = 0.0) -> None: ...

    return PlayedRun(
        fleet=Fleet(folder=folder, shape=Shape(), redis=RedisServer(host="127.0.0.1", port=1)),
        reference=Agreeing(),
        scale=Scale(streams=3),
        slowness=Slowness(cores=2, workers=4, contention=1.0, quiet_s=0.5),
        salt="s",
        random=random.Random(1),
    )


async def test_fault_that_meets_no_request_gets_another_round(tmp_path):
    load = PlayedLoad()
    run = run_with(load, tmp_path)
    wanted = run.asks(Kind.GREEDY)
    await run.until_it_happens(load, wanted, lambda: len(load.sent) >= 9, "three rounds")
    assert [ask.unsalted for ask in load.sent] == 3 * [ask.unsalted for ask in wanted]
    assert len(set(load.sent)) == 9
    assert not run.problems


async def test_fault_that_never_happens_breaks_the_promise(tmp_path):
    load = PlayedLoad()
    run = run_with(load, tmp_path)
    await run.until_it_happens(load, run.asks(Kind.GREEDY), lambda: False, "a push")
    assert len(load.sent) == 3 * MAX_ROUNDS
    assert run.problems == ["the fault never happened: a push"]


async def test_load_of_slowest_stream_is_repeated_without_fault(tmp_path):
    """Its own load alone, with other salts, and the longest silence stretches the bound."""
    load = PlayedLoad(silence_s=7.0)
    run = run_with(load, tmp_path)
    quick, slow = run.asks(Kind.GREEDY), run.asks(Kind.GREEDY, first=50)
    await run.judge([answer_to(ask, began=1.0, silence_s=1.0) for ask in quick], after=1.0)
    await run.judge([answer_to(ask, began=9.0, silence_s=20.0) for ask in slow], after=9.0)
    before = run.slowness
    await Runner(folder=tmp_path, scale=run.scale)._unhurt(run)
    assert [ask.unsalted for ask in load.sent] == [ask.unsalted for ask in slow]
    assert not set(load.sent) & set(slow)
    assert run.slowness.quiet_s >= 7.0
    assert run.slowness.allowed(3.0) == replace(before, quiet_s=run.slowness.quiet_s).allowed(3.0)
    assert max(run.stalls) == 20.0
    assert not run.problems
