"""Two engines and a faulty fabric against one engine and none: the same greedy output, or an error worth retrying.

The fake model reads its KV, so a page that is missing, torn, stale or another request's becomes a wrong
token. Faults hit pushes (delay, reorder, corrupt, fail, lose the peer), peer messages (lose, repeat), and requests
(aborts); pools are small enough that requests wait, and are retracted, for memory.
"""

import random
from dataclasses import dataclass, replace

import pytest

from tandem_engine.base.names import RequestId
from tandem_engine.config import DisaggConfig, HostConfig, PreemptionMode, SchedulePolicy
from tandem_engine.forward.batch import ForwardBatch, ForwardResult
from tandem_engine.messages.control import PauseMode
from tandem_engine.messages.outputs import FinishReason
from tandem_engine.messages.requests import PrefixFetch
from tandem_engine.messages.transfer import Hello, TransferAborted
from tandem_testing.disagg_pair import CONFIG, DRAIN_TIMEOUT, Pair, Side, make_pair
from tandem_testing.fake_executor import FakeModel
from tandem_testing.fake_executors import Computed, LateExecutor
from tandem_testing.fake_transport import Fate
from tandem_testing.scheduler_builders import expected_prompt_logprobs
from tandem_testing.toy_grammar import ToyGrammars, toy_grammar

REQUESTS = 14
TURN_SECONDS = 0.1


@dataclass(frozen=True)
class Faults:
    """Probabilities, per push, per message and per request."""

    delay: float = 0.0
    corrupt: float = 0.0
    repeat: float = 0.0
    fail: float = 0.0
    lose_peer: float = 0.0
    lose_message: float = 0.0
    abort: float = 0.0
    pause: float = 0.0
    """Per turn: an operator pauses one of the engines for a few turns."""


NONE = Faults()
SLOW = Faults(delay=0.6, repeat=0.3, pause=0.05)
HOSTILE = Faults(
    delay=0.5, corrupt=0.1, repeat=0.2, fail=0.05, lose_peer=0.05, lose_message=0.05, abort=0.2, pause=0.05
)


def inject_faults(pair: Pair, faults: Faults, dice: random.Random) -> None:
    def happens(probability: float) -> bool:
        return dice.random() < probability

    def fate(_push: object) -> Fate:
        return Fate(
            delay=dice.randrange(1, 12) if happens(faults.delay) else 0,
            corrupt=happens(faults.corrupt),
            fail=happens(faults.fail),
            lose_peer=happens(faults.lose_peer),
        )

    pair.fabric.fates = fate
    pair.network.lost = lambda _message: happens(faults.lose_message)
    pair.network.repeats = lambda _message: 2 if happens(faults.repeat) else 0


def drive(pair: Pair, faults: Faults, dice: random.Random) -> list[str]:
    """Submit requests over time, with shared prefixes, abort some, and run until both engines rest."""
    shared = [dice.randrange(1, 90) for _ in range(9)]
    waiting = [f"r{i}" for i in range(REQUESTS)]
    rids = [*waiting]
    doomed = {rid for rid in rids if dice.random() < faults.abort}
    for _ in range(3000):
        if waiting and dice.random() < 0.4:
            submit(pair, waiting.pop(0), shared, dice)
        started = [rid for rid in doomed if rid not in waiting]
        if started and dice.random() < 0.2:
            abort(pair, started[0])
            doomed.discard(started[0])
        if dice.random() < faults.pause:
            pause(pair, dice)
        pair.turn()
        pair.pass_time(TURN_SECONDS)
        if not waiting and not doomed and pair.at_rest():
            return rids
    raise AssertionError("not at rest")


EDITS: list[dict[str, object]] = [
    {},
    {},
    {"repetition_penalty": 2.0, "frequency_penalty": 0.5, "prompt_logprobs": 1},
    {"presence_penalty": 1.5, "logit_bias": ((5, 4.0),)},
    {"bad_words": tuple((first, second) for first in range(97) for second in (first, 8))[:256]},
]
"""Whatever depends on tokens that another worker has sampled [history-rebuilt], and what only the prefill worker
knows."""


def submit(pair: Pair, rid: str, shared: list[int], dice: random.Random) -> None:
    is_choice = dice.random() < 0.3
    own = [] if is_choice else [dice.randrange(1, 90) for _ in range(dice.randrange(1, 20))]
    prompt = [*shared, *shared] if is_choice else [*shared[: dice.choice([0, 4, 9])], *own]
    max_tokens = dice.choice([1, 2, 6, 12])
    ignore_eos = dice.random() < 0.5
    grammar = toy_grammar(every=3, length=dice.randrange(1, 9)) if dice.random() < 0.3 else None
    ends = [pair.submit_prefill, pair.submit_decode]
    dice.shuffle(ends)
    edits = dice.choice(EDITS)
    priority = dice.choice([0, 0, 5])
    for end in ends:
        group = "choices" if is_choice else ""
        fetch = fetch_from(pair.decode, rid) if end == pair.submit_prefill else None
        end(
            rid,
            tuple(prompt),
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            group=group,
            grammar=grammar,
            priority=priority,
            tenant="ab"[ord(rid[-1]) % 2],
            fetch=fetch,
            **edits,
        )


def fetch_from(side: Side, rid: str) -> PrefixFetch | None:
    """What a gateway says that takes the other engine to have a prefix: rightly or not, sometimes in a hurry."""
    dice = random.Random(f"fetch {rid}")
    if dice.random() < 0.4:
        return None
    return PrefixFetch(peer=side.peer, tokens=dice.randrange(1, 40), within_s=dice.choice([0.05, 0.5, 5.0]))


def abort(pair: Pair, rid: str) -> None:
    for side in (pair.prefill, pair.decode):
        side.engine.scheduler.abort(RequestId(rid))


def pause(pair: Pair, dice: random.Random) -> None:
    side = dice.choice([pair.prefill, pair.decode])
    side.engine.scheduler.pause(dice.choice([PauseMode.IN_PLACE, PauseMode.RETRACT]))
    for _ in range(dice.randrange(1, 6)):
        pair.turn()
        pair.pass_time(TURN_SECONDS)
    side.engine.scheduler.resume()


def client_view(pair: Pair, rid: str) -> list[int]:
    """Tokens as a gateway merges them: by position, from either worker, the first to come kept."""
    merged: dict[int, int] = {}
    for side in (pair.prefill, pair.decode):
        received = side.engine.received.get(rid)
        for output in received.outputs if received else ():
            for offset, token in enumerate(output.token_ids):
                seen = merged.setdefault(output.index + offset, token)
                assert seen == token, f"{rid}: the workers disagree at position {output.index + offset}"
    return [merged[position] for position in sorted(merged)]


def finishes(pair: Pair, rid: str) -> list[FinishReason]:
    return [side.finish(rid).reason for side in (pair.prefill, pair.decode) if side.finish(rid) is not None]


def assert_right_or_retryable(pair: Pair, rid: str) -> bool:
    """No wrong token, ever; and an end that the gateway can act on. True when the output is complete."""
    tokens, expected = client_view(pair, rid), pair.expected(rid)
    assert tokens == expected[: len(tokens)], f"{rid}: {tokens} instead of {expected}"
    errors = [side.finish(rid) for side in (pair.prefill, pair.decode) if failed(side, rid)]
    assert all(error.retryable for error in errors)
    complete = bool({FinishReason.STOP, FinishReason.LENGTH} & {*finishes(pair, rid)})
    assert not complete or tokens == expected
    assert not tokens or prompt_logprobs_are_right(pair, rid)
    assert complete or errors or FinishReason.ABORT in finishes(pair, rid), f"{rid} ended without a word"
    return complete


def prompt_logprobs_are_right(pair: Pair, rid: str) -> bool:
    """They come from the prefill worker, once, with its first token."""
    received = [side.engine.received.get(rid) for side in (pair.prefill, pair.decode)]
    by_prefill, by_decode = (None if got is None else got.prompt_logprobs for got in received)
    expected = expected_prompt_logprobs(pair.decode.engine.messages[rid])
    return by_decode is None and by_prefill == (expected if pair.prefill.tokens(rid) else None)


def failed(side: Side, rid: str) -> bool:
    finish = side.finish(rid)
    return finish is not None and finish.reason is FinishReason.ERROR


def raising_now_and_then(model: FakeModel) -> LateExecutor:
    """Every fifth step raises, before or after it writes its KV, unless a request is alone: twice would count as
    poison."""

    def forward(batch: ForwardBatch) -> ForwardResult:
        unlucky = batch.step % 5 == 0 and batch.num_sequences > 1
        if unlucky and batch.step % 2:
            raise RuntimeError("before")
        result = model.forward(batch)
        if unlucky:
            raise RuntimeError("after")
        return result

    return LateExecutor(Computed(forward=forward, copy=model.copy))


LAYERS = 3

ENGINES = {
    "plain": {},
    "overlap": {"enable_overlap": True, "chunked_prefill_size": 4},
    "mixed": {"enable_overlap": True, "enable_mixed_chunk": True, "chunked_prefill_size": 8},
    "no radix": {"radix": False, "chunked_prefill_size": 4},
    "small pages": {"page_size": 1, "usable_pages": 160, "enable_overlap": True},
    "tight": {"usable_pages": 14, "enable_overlap": True, "chunked_prefill_size": 4, "max_rows": 4},
    "host memory": {
        "usable_pages": 24,
        "enable_overlap": True,
        "force_retract_every": 5,
        "preemption_mode": PreemptionMode.SWAP,
        "host_pages": 20,
        "host": HostConfig(enable_cache=True, swap_bytes=256 * LAYERS),
    },
    "retracting": {"force_retract_every": 3, "enable_overlap": True, "chunked_prefill_size": 4},
    "raising": {"executor": raising_now_and_then, "enable_overlap": True, "chunked_prefill_size": 3},
    "raising, mixed": {
        "executor": raising_now_and_then,
        "enable_overlap": True,
        "enable_mixed_chunk": True,
        "max_prefill_tokens": 10,
        "chunked_prefill_size": 7,
    },
}


def push_layers(dice: random.Random) -> DisaggConfig:
    """Pages leave after their chunk, with it in one piece, or in two or three."""
    return replace(CONFIG, kv_push_layers=dice.choice([0, None, 2, 1]))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("faults", [NONE, SLOW, HOSTILE], ids=["no faults", "slow", "hostile"])
@pytest.mark.parametrize("seed", range(3))
def test_disaggregated_output_is_equal_or_retryable_error(engine, faults, seed):
    dice = random.Random(f"{engine}{faults}{seed}")
    # The KV of a request may arrive before its receiver has the grammar; or a sender may be late with it.
    prefill, decode = (30, 2) if seed % 2 else (2, 30)
    pair = make_pair(
        **ENGINES[engine],
        num_layers=LAYERS,
        config=push_layers(dice),
        prefill={"grammars": ToyGrammars(polls=prefill)},
        decode={"grammars": ToyGrammars(polls=decode)},
    )
    inject_faults(pair, faults, dice)
    rids = drive(pair, faults, dice)
    complete = [rid for rid in rids if assert_right_or_retryable(pair, rid)]
    if faults is not HOSTILE:
        assert complete == rids
    pair.assert_clean()


@pytest.mark.parametrize("policy", SchedulePolicy)
@pytest.mark.parametrize("faults", [NONE, HOSTILE], ids=["no faults", "hostile"])
@pytest.mark.parametrize("engine", ["tight", "overlap"])
def test_two_engines_give_the_output_of_one_under_every_policy(engine, faults, policy):
    dice = random.Random(f"{engine}{faults}{policy}")
    pair = make_pair(
        **ENGINES[engine],
        num_layers=LAYERS,
        config=push_layers(dice),
        schedule_policy=policy,
        priority_preemption_threshold=1,
        max_running_requests=3,
        max_retractions=500,
        prefill={"grammars": ToyGrammars(polls=2)},
        decode={"grammars": ToyGrammars(polls=30)},
    )
    inject_faults(pair, faults, dice)
    rids = drive(pair, faults, dice)
    complete = [rid for rid in rids if assert_right_or_retryable(pair, rid)]
    # Prompts that overtake may fill a memory this tight and wait for pages promised to the one they overtook.
    may_deadlock = engine == "tight" and policy is not SchedulePolicy.FCFS
    if faults is NONE and not may_deadlock:
        assert complete == rids
    assert complete
    pair.assert_clean()


def test_every_ack_lost_means_quarantine_and_not_a_wrong_token():  # [late-write] [ack-per-grant]
    dice = random.Random(7)
    faults = Faults(delay=0.9, abort=0.7)
    pair = make_pair(usable_pages=40, enable_overlap=True, chunked_prefill_size=4)
    inject_faults(pair, faults, dice)
    pair.network.lost = lambda message: isinstance(message, TransferAborted)
    rids: list[str] = []
    shared = [1, 2, 3, 4, 5]
    for i in range(10):
        rids.append(f"r{i}")
        submit(pair, rids[-1], shared, dice)
        pair.turn(2)
        if dice.random() < faults.abort:
            abort(pair, rids[-1])
        pair.turn(6)
    for _ in range(300):
        pair.turn()
        pair.pass_time(TURN_SECONDS)
    assert pair.decode.stage.quarantined_pages() > 0
    for rid in rids:
        tokens = client_view(pair, rid)
        assert tokens == pair.expected(rid)[: len(tokens)]
    pair.decode.stage.peer_ended(pair.prefill.peer.incarnation)
    pair.pass_time(DRAIN_TIMEOUT)
    pair.turn(5)
    pair.assert_clean()


def test_lost_greeting_costs_one_request_and_is_repeated():
    pair = make_pair()
    pair.network.lost = lambda message: isinstance(message, Hello)
    pair.submit("first")
    pair.run(seconds_per_turn=TURN_SECONDS)
    assert pair.decode.finish("first").retryable
    pair.network.lost = lambda _message: False
    pair.submit("second")
    pair.run(seconds_per_turn=TURN_SECONDS)
    assert pair.decode.tokens("second") == pair.expected("second")
    pair.assert_clean()
