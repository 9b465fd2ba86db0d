"""Concurrent conversations have the output that each has for its whole history, whatever happens to them.

Turns begin while others run, some are aborted and sent again, pages are short, and pinned sessions are evicted all the
time.
"""

import random
from dataclasses import dataclass, field

import pytest

from tandem_engine.base.names import RequestId
from tandem_engine.config import HostConfig, PreemptionMode, SchedulePolicy
from tandem_engine.messages.outputs import FinishReason
from tandem_engine.messages.requests import SessionRef
from tandem_testing.disagg_pair import make_pair
from tandem_testing.scheduler_builders import Engine, expected_output, make_engine, make_message

TURNS = 4


@dataclass(kw_only=True)
class Talk:
    """One conversation, as its client knows it."""

    id: str
    dice: random.Random
    history: list[int] = field(default_factory=list)
    turns: int = 0
    attempts: int = 0
    asked: list[int] = field(default_factory=list)
    keeps_output: bool = True

    @property
    def rid(self) -> str:
        return f"{self.id}-{self.attempts}"

    @property
    def over(self) -> bool:
        return self.turns == TURNS

    def ask(self, engine: Engine) -> None:
        self.attempts += 1
        self.asked = [self.dice.randrange(1, 90) for _ in range(self.dice.randrange(1, 25))]
        turn = None if self.turns and self.dice.random() < 0.3 else self.turns
        self.keeps_output = self.dice.random() < 0.7
        session = SessionRef(id=self.id, turn=turn, keeps_output=self.keeps_output)
        engine.add(make_message(self.rid, self.asked, max_tokens=self.dice.randrange(1, 9), session=session))

    def listen(self, engine: Engine) -> None:
        """Take the turn's end, which must be right, or an abort, which must have added nothing."""
        finish = engine.finish(self.rid)
        assert finish is not None, f"{self.rid} has not ended"
        if finish.reason is FinishReason.ABORT:
            return
        assert finish.reason is FinishReason.LENGTH, finish
        whole = make_message("whole", [*self.history, *self.asked], max_tokens=len(engine.output(self.rid)))
        assert engine.output(self.rid) == expected_output(whole), self.rid
        self.history += [*self.asked, *(engine.output(self.rid) if self.keeps_output else ())]
        self.turns += 1


def converse(engine: Engine, dice: random.Random, *, talks: int) -> None:
    waiting = [Talk(id=f"talk-{number}", dice=dice) for number in range(talks)]
    asked: list[Talk] = []
    while waiting or asked:
        if waiting and dice.random() < 0.5:
            asked.append(waiting.pop(dice.randrange(len(waiting))))
            asked[-1].ask(engine)
        if asked and dice.random() < 0.05:
            engine.scheduler.abort(RequestId(dice.choice(asked).rid))
        engine.step()
        for talk in [talk for talk in asked if engine.finish(talk.rid) is not None]:
            talk.listen(engine)
            asked.remove(talk)
            waiting += [] if talk.over else [talk]
    engine.run()
    engine.assert_nothing_held()


ENGINES = {
    "plain": {},
    "overlap": {"enable_overlap": True},
    "mixed": {"enable_overlap": True, "enable_mixed_chunk": True, "schedule_policy": SchedulePolicy.LPM},
    "retracting": {"enable_overlap": True, "force_retract_every": 3, "max_retractions": 1000},
    "swapping": {
        "enable_mixed_chunk": True,
        "force_retract_every": 3,
        "max_retractions": 1000,
        "preemption_mode": PreemptionMode.SWAP,
        "host": HostConfig(enable_cache=True, swap_bytes=16 * 64),
    },
}


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_each_session_turn_is_generated_from_all_earlier_turns(name, page_size):
    engine = make_engine(
        page_size=page_size,
        usable_pages=256 // page_size,
        chunked_prefill_size=16,
        session_pages=128 // page_size,
        host_pages=256 // page_size if name == "swapping" else 0,
        **ENGINES[name],
    )
    converse(engine, random.Random(f"{name}{page_size}"), talks=6)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_conversations_after_handoff_continue_on_decode_worker(page_size):
    pair = make_pair(
        enable_overlap=True,
        page_size=page_size,
        usable_pages=256 // page_size,
        chunked_prefill_size=16,
        decode={"session_pages": 128 // page_size, "force_retract_every": 4, "max_retractions": 1000},
    )
    decode = pair.decode.engine
    prompts = {f"talk-{number}": tuple(range(number + 1, number + 30)) for number in range(3)}
    for name, prompt in prompts.items():
        pair.submit_prefill(name, prompt, max_tokens=5)
        pair.submit_decode(name, prompt, max_tokens=5, session=SessionRef(id=name))
        pair.turn(2)
    pair.run()
    for name in prompts:
        decode.add(make_message(f"{name}-1", (7, 8, 9), max_tokens=5, session=SessionRef(id=name, turn=1)))
        pair.turn(2)
    pair.run()
    for name, prompt in prompts.items():
        spoken = (*prompt, *decode.output(name), 7, 8, 9)
        assert decode.output(name) == pair.expected(name)
        assert decode.output(f"{name}-1") == expected_output(make_message("whole", spoken, max_tokens=5))
    pair.assert_clean()
