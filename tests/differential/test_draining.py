"""Running requests that change their worker at random moments: the output of one undisturbed engine, token for token.

The fake model reads its KV, so a page that is missing, torn or stale after a move becomes a wrong token.
"""

import random
from collections.abc import Callable

import pytest

from tandem_testing.fake_transport import Fate
from tandem_testing.moving_fleet import MovingFleet, make_fleet
from tandem_testing.scheduler_builders import VOCAB, make_message
from tandem_testing.scripted_proposer import ScriptedProposer, wrong_every
from tandem_testing.toy_grammar import ToyGrammars, toy_grammar

REQUESTS = 12

ENGINES: dict[str, dict[str, object]] = {
    "plain": {},
    "overlap": {"enable_overlap": True, "chunked_prefill_size": 8},
    "mixed": {"enable_overlap": True, "enable_mixed_chunk": True, "chunked_prefill_size": 8},
    "no radix": {"radix": False, "enable_overlap": True},
    "small pages": {"page_size": 1, "usable_pages": 400, "enable_overlap": True},
    "tight": {"usable_pages": 36, "enable_overlap": True, "max_retractions": 500},
    "retracting": {"force_retract_every": 5, "enable_overlap": True, "max_retractions": 500},
}
KINDS: list[dict[str, object]] = [
    {},
    {"temperature": 1.0, "seed": 11},
    {"repetition_penalty": 2.0, "frequency_penalty": 0.5},
    {"presence_penalty": 1.5, "logprobs": 2},
    {"prompt_logprobs": 1},
    {"grammar": toy_grammar(every=3, length=30)},
]


def submit_some(fleet: MovingFleet, dice: random.Random) -> None:
    """Requests with shared prefixes, some of them choices of one answer, some handed over at their beginning."""
    shared = [dice.randrange(1, 90) for _ in range(9)]
    for i in range(REQUESTS):
        own = [dice.randrange(1, 90) for _ in range(dice.randrange(1, 20))]
        is_choice = dice.random() < 0.3
        prompt = [*shared, *shared] if is_choice else [*shared[: dice.choice([0, 4, 9])], *own]
        group = "choices" if is_choice else ""
        message = make_message(f"r{i}", prompt, max_tokens=dice.randrange(2, 48), group=group, **dice.choice(KINDS))
        taker, other = dice.sample(fleet.sides, 2)
        fleet.submit(message, taker, prefill=other if dice.random() < 0.4 else None)
        for _ in range(dice.randrange(3)):
            fleet.turn()


def slow(dice: random.Random) -> Callable[[object], Fate]:
    return lambda _push: Fate(delay=dice.randrange(12))


def hostile(dice: random.Random) -> Callable[[object], Fate]:
    def fate(_push: object) -> Fate:
        happens = dice.random()
        return Fate(delay=dice.randrange(6), corrupt=happens < 0.15, fail=0.15 < happens < 0.3)

    return fate


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("fates", [None, slow, hostile], ids=["no faults", "slow", "hostile"])
@pytest.mark.parametrize("seed", range(2))
def test_streams_survive_drains_token_for_token(engine, fates, seed):
    dice = random.Random(f"{engine}{fates}{seed}")
    fleet = make_fleet(**ENGINES[engine], grammars=ToyGrammars(polls=3))
    if fates is not None:
        fleet.fabric.fates = fates(dice)
    submit_some(fleet, dice)
    for side in dice.sample(fleet.sides, 2):
        fleet.drain(side)
        for _ in range(dice.randrange(1, 40)):
            fleet.turn()
    fleet.run()
    fleet.assert_exact()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("seed", range(2))
def test_streams_survive_roles_that_change_again_and_again(engine, seed):
    dice = random.Random(f"{engine}{seed}")
    fleet = make_fleet(**ENGINES[engine], grammars=ToyGrammars(polls=3))
    submit_some(fleet, dice)
    for _ in range(6):
        side = dice.choice(fleet.sides[1:])
        fleet.flip(side, prefill=side not in fleet.left)
        for _ in range(dice.randrange(1, 15)):
            fleet.turn()
    fleet.run()
    fleet.assert_exact()


def test_migrated_long_outputs_keep_their_kv():
    fleet = make_fleet(enable_overlap=True, usable_pages=400, max_rows=32)
    a = fleet.sides[0]
    prompt = range(1, 10)
    streams = [fleet.submit(make_message(f"r{i}", [i + 1, *prompt], max_tokens=60), a) for i in range(10)]
    for _ in range(20):
        fleet.turn()
    fleet.drain(a)
    fleet.run()
    fleet.assert_exact()
    assert (fleet.moved, [stream.failures for stream in streams]) == (10, [0] * 10)
    # What was sent was found in the prefix cache, the prompt and more: at most a page was computed again.
    sent = [a.engine.received[f"r{i}-1"].outputs[0] for i in range(10)]
    assert [output.cached_tokens for output in sent] == [10] * 10


def test_migration_waits_for_capacity_while_requests_run():
    fleet = make_fleet(usable_pages=100)
    a = fleet.sides[0]
    fleet.has_room = lambda: False
    short = fleet.submit(make_message("short", range(1, 9), max_tokens=20), a)
    long = fleet.submit(make_message("long", range(2, 9), max_tokens=100), a)
    fleet.turn()
    fleet.drain(a)
    for _ in range(40):
        fleet.turn()
    assert (short.finish is not None, short.moves, long.moves) == (True, 0, 0)
    assert len(long.tokens) > 20
    fleet.has_room = lambda: True
    fleet.run()
    fleet.assert_exact()
    assert (long.moves, fleet.moved) == (1, 1)


@pytest.mark.parametrize("overlap", [False, True])
def test_requests_with_drafts_migrate(overlap):
    proposer = ScriptedProposer(vocab_size=VOCAB, mistake=wrong_every(3))
    fleet = make_fleet(proposer=proposer, enable_overlap=overlap, usable_pages=400, max_rows=32)
    kinds: list[dict[str, object]] = [{}, {"temperature": 0.9, "seed": 7}, {"logprobs": 2}]
    for i in range(12):
        fleet.submit(make_message(f"r{i}", range(i + 1, 20), max_tokens=60, **kinds[i % 3]), fleet.sides[0])
    for _ in range(8):
        fleet.turn()
    fleet.drain(fleet.sides[0])
    fleet.run()
    fleet.assert_exact()
    assert proposer.proposals
    assert fleet.moved == 12
