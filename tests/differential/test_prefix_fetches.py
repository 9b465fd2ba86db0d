"""Two engines that fetch prefixes from each other, over a faulty fabric: whatever becomes of a fetch, the same output.

Conversations continue at either engine, as a router may send them, each turn naming the other engine as the one that
has what came before: it has, or has had, or never had. No fault of a fetch may show but as computing.
"""

import random
from dataclasses import dataclass, field

import pytest

from tandem_engine.base.names import RequestId
from tandem_engine.config import HostConfig, PreemptionMode
from tandem_engine.messages.control import PauseMode
from tandem_engine.messages.outputs import FinishReason
from tandem_engine.messages.requests import PrefixFetch
from tandem_testing.disagg_pair import CONFIG, Pair, Side, make_pair
from tandem_testing.fake_transport import Fate
from tandem_testing.scheduler_builders import make_message
from tandem_testing.toy_grammar import ToyGrammars, toy_grammar

TURNS = 50
TURN_SECONDS = 0.02
HURRIES = (0.05, 0.5, 5.0)

ENGINES = {
    "plain": {"usable_pages": 200},
    "overlap": {"enable_overlap": True, "chunked_prefill_size": 4, "usable_pages": 200},
    "evicting": {"usable_pages": 40, "enable_overlap": True},
    "retracting": {"force_retract_every": 3, "enable_overlap": True, "chunked_prefill_size": 4},
    "no radix": {"radix": False},
    "host memory": {
        "usable_pages": 40,
        "enable_overlap": True,
        "force_retract_every": 5,
        "preemption_mode": PreemptionMode.SWAP,
        "host_pages": 60,
        "host": HostConfig(enable_cache=True, swap_bytes=256),
    },
}


@dataclass(frozen=True)
class Faults:
    """Probabilities, per push, per message and per turn."""

    delay: float = 0.0
    spoilt: float = 0.0
    """Corrupt, failed or with the peer lost, as often as each other."""
    lost: float = 0.0
    abort: float = 0.0
    pause: float = 0.0
    emptied: float = 0.0
    """The cache of an engine."""
    within_s: tuple[float, ...] = (5.0,)
    """What requests wait at most."""


FAULTS = {
    "no faults": Faults(),
    "slow": Faults(delay=0.7, pause=0.05, within_s=HURRIES),
    "hostile": Faults(delay=0.5, spoilt=0.25, lost=0.05, abort=0.2, pause=0.05, emptied=0.05, within_s=HURRIES),
}


@dataclass
class Talks:
    """Conversations under way."""

    pair: Pair
    faults: Faults
    dice: random.Random
    histories: list[tuple[Side, list[int]]] = field(default_factory=list)
    """With the engine that has, or had, their KV."""
    at: dict[str, Side] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)

    def submit(self, serial: int) -> None:
        dice = self.dice
        if not self.histories or dice.random() < 0.2:
            side = dice.choice([self.pair.prefill, self.pair.decode])
            self.histories.append((side, [dice.randrange(1, 90) for _ in range(dice.randrange(2, 30))]))
        there, history = dice.choice(self.histories)
        prompt = [*history, *(dice.randrange(1, 90) for _ in range(dice.randrange(1, 6)))]
        here = self.pair.prefill if there is self.pair.decode else self.pair.decode
        fetch = PrefixFetch(
            peer=there.peer,
            tokens=dice.randrange(1, len(prompt) + 1),
            within_s=dice.choice(self.faults.within_s),
        )
        message = make_message(
            f"r{serial}",
            prompt,
            max_tokens=dice.choice([1, 4, 9]),
            fetch=None if dice.random() < 0.1 else fetch,
            group=dice.choice(["", "", "choices"]),
            cache_salt=dice.choice(["", "", "", "salt"]),
            grammar=toy_grammar(every=3, length=5) if dice.random() < 0.2 else None,
            prompt_logprobs=dice.choice([None, None, 1]),
        )
        self.at[message.rid] = here
        here.engine.add(message)

    def collect(self) -> None:
        """Add finished turns to the histories that later turns continue."""
        for rid, side in self.at.items():
            finish, message = side.finish(rid), side.engine.messages[rid]
            whole = [*message.input_ids, *side.tokens(rid)]
            if finish is not None and finish.reason is FinishReason.LENGTH and len(whole) < 150:
                self.histories.append((side, whole))
        self.histories = self.histories[-6:]

    def disturb(self) -> None:
        faults, dice, side = self.faults, self.dice, self.dice.choice([self.pair.prefill, self.pair.decode])
        if dice.random() < faults.abort and self.at:
            rid = dice.choice([*self.at])
            self.aborted.add(rid)
            self.at[rid].engine.scheduler.abort(RequestId(rid))
        if dice.random() < faults.emptied:
            side.engine.scheduler.pause(PauseMode.RETRACT)
            side.engine.scheduler.forget_kv()
            side.engine.scheduler.resume()
        if dice.random() < faults.pause:
            side.engine.scheduler.pause(dice.choice([PauseMode.IN_PLACE, PauseMode.RETRACT]))
            self.turn(dice.randrange(1, 6))
            side.engine.scheduler.resume()

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.pair.turn()
            self.pair.pass_time(TURN_SECONDS)


def inject_faults(pair: Pair, faults: Faults, dice: random.Random) -> None:
    spoilt = [Fate(corrupt=True), Fate(fail=True), Fate(lose_peer=True)]

    def fate(_push: object) -> Fate:
        if dice.random() < faults.spoilt:
            return dice.choice(spoilt)
        return Fate(delay=dice.randrange(1, 12) if dice.random() < faults.delay else 0)

    pair.fabric.fates = fate
    pair.network.lost = lambda _message: dice.random() < faults.lost
    pair.network.delay = lambda _message: dice.randrange(1, 8) if dice.random() < faults.delay else 0


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("faults", FAULTS)
@pytest.mark.parametrize("seed", range(3))
def test_output_is_unchanged_by_fetch_faults(engine, faults, seed):
    dice = random.Random(f"{engine}{faults}{seed}")
    pair = make_pair(**ENGINES[engine], config=CONFIG, context_length=400, grammars=ToyGrammars(polls=5))
    inject_faults(pair, FAULTS[faults], dice)
    talks = Talks(pair, FAULTS[faults], dice)
    for serial in range(TURNS):
        talks.submit(serial)
        talks.turn(dice.randrange(1, 12))
        talks.disturb()
        talks.collect()
    pair.run(seconds_per_turn=TURN_SECONDS)
    for rid, side in talks.at.items():
        if rid not in talks.aborted:
            side.engine.assert_expected(rid)
    pair.assert_clean()
    counters = [side.stage.prefixes.counters for side in (pair.prefill, pair.decode)]
    fetched = sum(each.fetched for each in counters)
    if faults != "hostile":
        assert (fetched > 0) == (engine != "no radix"), counters
    if faults == "no faults":
        assert not any(each.failed for each in counters)
    assert not any(side.engine.memory.pins for side in (pair.prefill, pair.decode))
