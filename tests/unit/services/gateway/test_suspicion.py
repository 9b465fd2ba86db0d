"""Which requests count as the cause of a lost worker [poison-quarantined]."""

import asyncio

import pytest

from tandem_services.gateway.dispatch.quarantine import MAX_WORKERS, PROOF_TOKENS, Suspects, Suspicion


def lost(*workers: str, alone: bool = True) -> Suspicion:
    history = Suspicion()
    for worker in workers:
        history.note_loss(worker, gained=0, alone=alone)
    return history


def test_loss_of_two_workers_quarantines_and_of_one_does_not():
    assert not lost("a@1").is_poison
    assert lost("a@1", "b@1").is_poison


def test_losing_the_connection_to_one_worker_twice_is_one_worker():
    assert not lost("a@1", "a@1").is_poison
    assert lost("a@1", "a@2").is_poison


def test_one_that_had_proved_itself_was_not_the_cause():
    history = lost("a@1")
    for nth in range(9):
        history.note_loss(f"w{nth}@1", gained=PROOF_TOKENS, alone=True)
        history.note_loss(f"v{nth}@1", gained=PROOF_TOKENS - 1, alone=True)
        assert not history.is_poison


def test_among_other_suspects_it_takes_a_third_worker():
    history = lost("a@1", "b@1", alone=False)
    assert (history.is_poison, history.needs_trial) == (False, True)
    history.note_loss("c@1", gained=0, alone=False)
    assert history.is_poison


def test_worker_that_lives_after_all_was_not_killed():
    history = lost("a@1", alone=False)
    history.clear_losses(["a@1", "c@1"])
    history.note_loss("b@1", gained=0, alone=True)
    assert not history.is_poison
    history.note_loss("c@1", gained=0, alone=True)
    assert history.is_poison


def test_first_loss_that_counts_decides_if_others_were_there():
    history = lost("a@1")
    history.note_loss("b@1", gained=0, alone=False)
    history.clear_losses(["a@1"])
    history.note_loss("c@1", gained=0, alone=False)
    assert not history.is_poison
    history.note_loss("d@1", gained=0, alone=True)
    assert history.is_poison


async def test_concurrent_suspects_on_one_worker_are_not_alone():
    suspects = Suspects()
    first, second = [await suspects.enter(lost("a@1"), rid, ["b@1"]) for rid in ("x", "y")]
    for trial in (first, second):
        assert not suspects.alone("b@1")
        trial.lost("b@1")
    assert not suspects.alone("b@1")


async def test_suspect_that_proved_itself_is_none_any_more():
    suspects = Suspects()
    first, _ = [await suspects.enter(lost("a@1"), rid, ["b@1", "p@1"]) for rid in ("x", "y")]
    first.cleared()
    assert suspects.alone("b@1")
    assert suspects.alone("p@1")


async def test_other_worker_of_a_lost_pair_has_one_suspect_less():
    suspects = Suspects()
    first, _ = [await suspects.enter(lost("a@1"), rid, ["d@1", "p@1"]) for rid in ("x", "y")]
    first.lost("d@1")
    assert not suspects.alone("d@1")
    assert suspects.alone("p@1")


async def test_shared_first_loss_delays_quarantine_of_request():
    """Two workers that die of something else within a moment quarantine no request [streams-wait]."""
    history = lost("a@1", alone=False)
    history.note_loss("b@1", gained=0, alone=True)
    assert not history.is_poison
    history.proved()
    history.note_loss("c@1", gained=0, alone=True)
    history.note_loss("d@1", gained=0, alone=True)
    assert history.is_poison


@pytest.mark.parametrize("end", ["cleared", "lost"])
async def test_trials_follow_one_another(end):
    suspects, faulty = Suspects(), lost("a@1", "b@1", alone=False)
    first = await suspects.enter(faulty, "x", ["c@1"])
    second = asyncio.ensure_future(suspects.enter(faulty, "y", ["c@1"]))
    await asyncio.sleep(0)
    assert not second.done()
    {"cleared": first.cleared, "lost": lambda: first.lost("c@1")}[end]()
    (await second).cleared()
    first.cleared()


async def test_cancelled_waiting_trial_does_not_block_others():
    suspects, faulty = Suspects(), lost("a@1", "b@1", alone=False)
    first = await suspects.enter(faulty, "x", ["c@1"])
    leaving = asyncio.ensure_future(suspects.enter(faulty, "y", ["c@1"]))
    await asyncio.sleep(0)
    leaving.cancel()
    first.cleared()
    (await suspects.enter(faulty, "z", ["c@1"])).cleared()


async def test_memory_is_bounded():
    suspects = Suspects()
    for nth in range(MAX_WORKERS + 9):
        (await suspects.enter(lost("a@1"), "x", [f"w{nth}@1"])).lost(f"w{nth}@1")
    assert len(suspects._unproven) == MAX_WORKERS
