"""Engines of unequal numbers of ranks and a faulty fabric: the output of one engine, or an error worth retrying.

Faults hit the slices of a push one by one. The ranks of an engine run on threads, so what becomes of a slice is decided
by its name and not by order of arrival.
"""

import random
from dataclasses import replace

import pytest

from tandem_engine.base.names import RequestId
from tandem_engine.disaggregation.ranks import transport as ranks_transport
from tandem_engine.disaggregation.transport import Push
from tandem_engine.messages.outputs import FinishReason
from tandem_engine.messages.transfer import PeerMessage, TransferAborted
from tandem_engine.parallel.inputs import LosePeer
from tandem_testing.disagg_network import PeerNetwork, make_peer
from tandem_testing.disagg_pair import CONFIG, DRAIN_TIMEOUT, Pair
from tandem_testing.fake_transport import FakeFabric, Fate
from tandem_testing.ranked_side import make_ranked_side

UNEQUAL = [(1, 2), (2, 1), (2, 2), (4, 2)]
REQUESTS = 8
TURN_SECONDS = 0.1
LAYERS = 3
ENGINES = {
    "plain": {},
    "mixed": {"enable_overlap": True, "enable_mixed_chunk": True, "chunked_prefill_size": 8},
    "tight": {"usable_pages": 14, "enable_overlap": True, "chunked_prefill_size": 4, "max_rows": 4},
    "retracting": {"force_retract_every": 3, "enable_overlap": True, "chunked_prefill_size": 4},
}


def ranked_pair(senders: int, receivers: int, **engine: object) -> Pair:
    fabric, network = FakeFabric(), PeerNetwork()
    parts = {"fabric": fabric, "network": network, "num_layers": LAYERS, **engine}
    return Pair(
        fabric=fabric,
        network=network,
        prefill=make_ranked_side(make_peer("p"), senders, **parts),
        decode=make_ranked_side(make_peer("d"), receivers, **parts),
    )


def make_hostile(pair: Pair, seed: str) -> None:
    """Slices are late, torn, and lost with and without their peer; messages are lost."""

    def fate(push: Push) -> Fate:
        dice = random.Random(f"{seed}{push.key}{push.peer}")
        return Fate(
            delay=dice.randrange(1, 12) if dice.random() < 0.5 else 0,
            corrupt=dice.random() < 0.05,
            fail=dice.random() < 0.04,
            lose_peer=dice.random() < 0.03,
        )

    dice = random.Random(seed)
    pair.fabric.fates = fate
    pair.network.lost = lambda _message: dice.random() < 0.05


def drive(pair: Pair, dice: random.Random, *, aborts: float) -> list[str]:
    """Submit requests over time, with shared prefixes, abort some, and run until both engines rest."""
    shared = [dice.randrange(1, 90) for _ in range(9)]
    waiting = [f"r{i}" for i in range(REQUESTS)]
    rids = [*waiting]
    for _ in range(1500):
        if waiting and dice.random() < 0.3:
            prompt = [*shared[: dice.choice([0, 4, 9])], *(dice.randrange(1, 90) for _ in range(dice.randrange(1, 20)))]
            pair.submit(waiting.pop(0), prompt, max_tokens=dice.choice([1, 2, 6, 12]))
        if dice.random() < aborts:
            for side in (pair.prefill, pair.decode):
                side.engine.scheduler.abort(RequestId(dice.choice(rids)))
        pair.turn()
        pair.pass_time(TURN_SECONDS)
        if not waiting and pair.at_rest():
            return rids
    raise AssertionError("not at rest")


def client_view(pair: Pair, rid: str) -> list[int]:
    """Tokens as a gateway merges them, which both engines must agree on."""
    merged: dict[int, int] = {}
    for side in (pair.prefill, pair.decode):
        received = side.engine.received.get(rid)
        for output in received.outputs if received else ():
            for offset, token in enumerate(output.token_ids):
                assert merged.setdefault(output.index + offset, token) == token, rid
    return [merged[position] for position in sorted(merged)]


def is_complete(pair: Pair, rid: str) -> bool:
    """Checks that no token is wrong, and that an output which is not complete ended with a word."""
    finishes = [finish for side in (pair.prefill, pair.decode) if (finish := side.finish(rid)) is not None]
    tokens, expected = client_view(pair, rid), pair.expected(rid)
    assert tokens == expected[: len(tokens)], rid
    assert all(finish.retryable for finish in finishes if finish.reason is FinishReason.ERROR)
    assert finishes, f"{rid} ended without a word"
    complete = any(finish.reason in (FinishReason.STOP, FinishReason.LENGTH) for finish in finishes)
    assert not complete or tokens == expected
    return complete


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("senders", "receivers"), UNEQUAL)
@pytest.mark.parametrize("push_layers", [0, 1])
def test_unequal_ranks_give_the_output_of_one_engine(engine, senders, receivers, push_layers):
    config = {"config": replace(CONFIG, kv_push_layers=push_layers)}
    pair = ranked_pair(senders, receivers, **ENGINES[engine], **config)
    dice = random.Random(f"{engine}{senders}{receivers}")
    pair.fabric.fates = lambda push: Fate(delay=random.Random(f"{push.key}{push.peer}").randrange(4))
    rids = drive(pair, dice, aborts=0.0)
    assert [is_complete(pair, rid) for rid in rids] == [True] * len(rids)
    pair.assert_clean()


@pytest.mark.parametrize(("senders", "receivers"), [(1, 2), (1, 4), (4, 1), (4, 2)])
def test_packed_slices_give_the_output_of_one_engine(senders, receivers, monkeypatch):
    """A run for each page in place of one for each layer, K and V; some layers at a time, in any order of slices."""
    monkeypatch.setattr(ranks_transport, "pays_to_pack", lambda *_: True)
    pair = ranked_pair(senders, receivers, **ENGINES["mixed"], config=replace(CONFIG, kv_push_layers=1))
    packed = []

    def fate(push: Push) -> Fate:
        packed.append(push.packed)
        return Fate(delay=random.Random(f"{push.key}{push.peer}").randrange(4))

    pair.fabric.fates = fate
    rids = drive(pair, random.Random(f"{senders}{receivers}"), aborts=0.0)
    assert [is_complete(pair, rid) for rid in rids] == [True] * len(rids)
    assert {*packed} == {True}
    pair.assert_clean()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("senders", "receivers"), UNEQUAL)
@pytest.mark.parametrize("seed", range(2))
def test_slice_faults_cause_no_wrong_token_or_page_leak(engine, senders, receivers, seed, monkeypatch):
    """Of slices that are packed, and that are not."""
    monkeypatch.setattr(ranks_transport, "pays_to_pack", lambda *_: seed == 1)
    pair = ranked_pair(senders, receivers, **ENGINES[engine])
    name = f"{engine}{senders}{receivers}{seed}"
    make_hostile(pair, name)
    rids = drive(pair, random.Random(name), aborts=0.03)
    for rid in rids:
        is_complete(pair, rid)
    pair.assert_clean()


@pytest.mark.parametrize(("senders", "receivers"), UNEQUAL)
def test_all_ranks_quarantine_equal_pages_until_writer_exits(senders, receivers):  # [late-write]
    pair = ranked_pair(senders, receivers)
    pair.fabric.fates = lambda _push: Fate(delay=10_000)
    pair.network.lost = _is_ending
    pair.submit()
    pair.turn(6)
    for side in (pair.prefill, pair.decode):
        side.engine.scheduler.abort(RequestId("r"))
    pair.pass_time(DRAIN_TIMEOUT)
    pair.turn(2)
    stages = [inputs.stage for inputs in pair.decode.engine.inputs]
    held = [sorted(stage.held_pages()) for stage in stages]
    assert held[0]
    assert all(pages == held[0] for pages in held)
    assert all(stage.quarantined_pages() == len(held[0]) for stage in stages)
    pair.decode.engine.submit(LosePeer(incarnation=pair.prefill.peer.incarnation))
    pair.turn(2)
    assert all(sorted(stage.held_pages()) == held[0] for stage in stages)
    pair.decode.engine.submit(LosePeer(incarnation=pair.prefill.peer.incarnation, ended=True))
    pair.decode.assert_clean()


def _is_ending(message: PeerMessage) -> bool:
    return isinstance(message, TransferAborted)
