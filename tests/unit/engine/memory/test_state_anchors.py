"""Anchors: which lengths of a prefix can be continued, and which slots hold their states."""

from collections import Counter

import pytest

from tandem_engine.memory.allocator import PageAllocator, ReqToTokenPool
from tandem_engine.memory.audit import check_conservation
from tandem_engine.memory.kv_memory import KvMemory
from tandem_engine.memory.page_copies import CopyQueue
from tandem_engine.memory.radix_cache import RadixCache
from tandem_engine.memory.request_kv import RequestKv
from tandem_engine.memory.state_anchors import StateAnchors
from tandem_engine.messages.kv_events import BASE_SPACE
from tandem_testing.memory_builders import copy_at_once

PAGE = 16
SLOTS = range(5, 8)
GRAIN = 64
SLOT_BYTES = 1024


def make(slots=SLOTS, *, pages: int = 60, page_size: int = PAGE, trials: bool = True) -> KvMemory:
    anchors = StateAnchors(slots, page_size=page_size, slot_bytes=SLOT_BYTES, trials=trials)
    return KvMemory(
        rows=ReqToTokenPool(4, 80),
        allocator=PageAllocator(pages, None, [anchors]),
        cache=RadixCache(page_size, usable=anchors.usable_blocks),
        page_size=page_size,
        copies=CopyQueue(submit=copy_at_once),
        stateful=True,
        anchors=anchors,
    )


def launch(memory: KvMemory, kv: RequestKv, start: int, stop: int, *, settles: bool = True):
    """In a step of its own."""
    assert memory.ensure(kv, stop)
    step = memory.last_settled + 1
    moves = memory.state_moves(step, [kv], [start], [stop])
    if settles:
        memory.settled(step)
    return moves


def compute(memory: KvMemory, tokens: list[int], *, decodes: int = 0) -> RequestKv:
    """A request that begins and computes all of `tokens` in one step, then some more by one; it continues."""
    kv = memory.begin(tokens, space=BASE_SPACE, max_match=len(tokens) - 1)
    assert kv is not None
    launch(memory, kv, kv.committed_len, len(tokens))
    memory.commit(kv, len(tokens))
    memory.checkpoint(kv, tokens)
    for start in range(len(tokens), len(tokens) + decodes):
        launch(memory, kv, start, start + 1)
        memory.commit(kv, start + 1)
    return kv


def end(memory: KvMemory, kv: RequestKv, tokens: list[int]) -> None:
    memory.release(kv, tokens, checkpoint=True, after_step=None)


def found(memory: KvMemory, tokens: list[int]) -> int:
    return memory.cached_len(tokens, space=BASE_SPACE, max_match=len(tokens) - 1)


def audited(memory: KvMemory, *kvs: RequestKv) -> None:
    assert check_conservation(memory, kvs, ()).problems == ()


@pytest.mark.parametrize(
    ("length", "usable"), [(63, 0), (64, 0), (65, 64), (127, 64), (128, 64), (129, 128), (200, 192)]
)
def test_same_prompt_again_computes_at_most_a_grain(length, usable):
    memory, tokens = make(), [*range(length)]
    end(memory, compute(memory, tokens), tokens)
    assert found(memory, tokens) == usable
    audited(memory)


def test_anchor_inside_a_step_is_a_snapshot_of_its_run():
    memory, tokens = make(), [*range(100)]
    kv = memory.begin(tokens, space=BASE_SPACE, max_match=99)
    assert kv is not None
    moves = launch(memory, kv, 0, 100)
    assert (moves.copies, moves.snapshots) == ((), ((0, 64, 5),))
    audited(memory, kv)


def test_chunk_that_ends_at_an_anchor_is_copied_by_the_next():
    memory, tokens = make(), [*range(100)]
    kv = memory.begin(tokens, space=BASE_SPACE, max_match=99)
    assert kv is not None
    assert launch(memory, kv, 0, 64) == ((), ())
    assert launch(memory, kv, 64, 100) == (((kv.row, 5),), ())


def test_anchor_of_the_step_before_waits_for_no_further_page():
    memory, tokens = make(), [*range(70)]
    kv = memory.begin(tokens, space=BASE_SPACE, max_match=69)
    assert kv is not None
    for start, stop in ((0, 64), (64, 70)):
        launch(memory, kv, start, stop)
        memory.commit(kv, stop)
        memory.checkpoint(kv, tokens[:stop])
    assert kv.pending_anchors == []
    assert found(memory, tokens) == 64
    audited(memory, kv)


def test_request_with_an_anchor_begins_with_a_copy_of_it():
    memory, tokens = make(), [*range(100)]
    end(memory, compute(memory, tokens), tokens)
    kv = memory.begin(tokens, space=BASE_SPACE, max_match=99)
    assert kv is not None
    assert kv.committed_len == 64
    audited(memory, kv)
    assert launch(memory, kv, 64, 100) == (((5, kv.row),), ())
    audited(memory, kv)


def test_next_turn_continues_where_the_answer_passed_a_grain():
    memory, tokens = make(), [*range(100)]
    kv = compute(memory, tokens, decodes=100)
    answered = [*tokens, *range(1000, 1101)]
    audited(memory, kv)
    end(memory, kv, answered)
    assert found(memory, [*answered, *range(50)]) == 192


def test_prompt_that_diverges_from_cache_marks_branch_point():
    """The first with this beginning could not know where another would leave it; the third continues there."""
    memory = make()
    shared = [*range(150)]
    prompts = [[*shared, *range(first, first + 80)] for first in (1000, 2000, 3000)]
    end(memory, compute(memory, prompts[0]), prompts[0])
    assert found(memory, prompts[1]) == 0
    end(memory, compute(memory, prompts[1]), prompts[1])
    assert found(memory, prompts[2]) == 128
    audited(memory)


LONG = [*range(1024)]
TRIALS = [128, 256, 384, 512, 640, 768]
"""Of `LONG`, whose last anchor is at 960."""


def branched(at: int, first: int = 5000) -> list[int]:
    """A prompt of the length of `LONG` that leaves it after `at` tokens."""
    return [*LONG[:at], *range(first, first + len(LONG) - at)]


def provisional(memory: KvMemory) -> int:
    assert memory.anchors is not None
    return memory.anchors.counts.provisional


def test_trials_within_a_prompt_are_snapshots_in_order():
    memory = make(range(5, 37), pages=200)
    kv = memory.begin(LONG, space=BASE_SPACE, max_match=1023)
    assert kv is not None
    moves = launch(memory, kv, 0, 700)
    assert [each.length for each in moves.snapshots] == [128, 256, 384, 512, 640]
    moves = launch(memory, kv, 700, 1024)
    assert [each.length for each in moves.snapshots] == [768, 960]
    audited(memory, kv)


def test_trial_where_a_chunk_ends_is_copied_by_the_next():
    memory = make(range(5, 37), pages=200)
    kv = memory.begin(LONG, space=BASE_SPACE, max_match=1023)
    assert kv is not None
    assert [each.length for each in launch(memory, kv, 0, 512).snapshots] == [128, 256, 384]
    moves = launch(memory, kv, 512, 600)
    assert [source for source, _ in moves.copies] == [kv.row]
    memory.commit(kv, 600)
    memory.checkpoint(kv, LONG[:600])
    assert found(memory, branched(560)) == 512
    audited(memory, kv)


@pytest.mark.parametrize(("shared", "usable"), [(1000, 960), (900, 768), (767, 640), (512, 512), (300, 256), (100, 0)])
def test_second_prompt_continues_before_branch_point(shared, usable):
    memory = make(range(5, 37), pages=200)
    end(memory, compute(memory, LONG), LONG)
    assert provisional(memory) == len(TRIALS)
    assert found(memory, branched(shared)) == usable
    kv = compute(memory, branched(shared))
    assert kv.known_len == shared // PAGE * PAGE
    end(memory, kv, branched(shared))
    third = branched(shared, 7000)
    assert found(memory, third) == max(usable, shared // PAGE * PAGE // GRAIN * GRAIN)
    audited(memory)


def test_trials_make_room_and_take_none_of_others():
    memory = make(range(5, 13), pages=400)
    kept = [[*range(first, first + 70)] for first in range(2000, 9000, 1000)]
    for tokens in kept:
        end(memory, compute(memory, tokens), tokens)
    end(memory, compute(memory, LONG), LONG)
    assert provisional(memory) == 0, "the one slot that was free is that of the end of the prompt"
    assert [found(memory, tokens) for tokens in kept] == [64] * len(kept)
    memory.clear_cache()
    end(memory, compute(memory, LONG), LONG)
    assert provisional(memory) == 2, "a quarter of the slots, as all were taken by one step"
    for tokens in kept:
        end(memory, compute(memory, tokens), tokens)
    assert provisional(memory) == 0
    assert [found(memory, tokens) for tokens in (*kept, LONG)] == [*[64] * len(kept), 960]
    audited(memory)


def test_oldest_trial_makes_room_for_another():
    memory = make(range(5, 12), pages=400)
    prompts = [[*range(first, first + 300)] for first in range(1000, 6000, 1000)]
    for tokens in prompts:
        end(memory, compute(memory, tokens), tokens)
    assert memory.anchors is not None
    assert memory.anchors.counts == (7, SLOT_BYTES, 5, 2, 3)
    assert [found(memory, [*tokens[:200], 0]) for tokens in prompts] == [0, 0, 0, 128, 128]
    audited(memory)


def test_trial_used_by_a_request_is_promoted():
    memory = make(range(5, 37), pages=200)
    end(memory, compute(memory, LONG), LONG)
    kv = memory.begin(branched(600), space=BASE_SPACE, max_match=1023)
    assert kv is not None
    assert (kv.committed_len, provisional(memory)) == (512, len(TRIALS))
    launch(memory, kv, 512, 1024)
    assert provisional(memory) == len(TRIALS) - 1
    audited(memory, kv)


def test_request_that_is_not_admitted_leaves_a_trial():
    memory = make(range(5, 13), pages=400)
    end(memory, compute(memory, LONG), LONG)
    trials = provisional(memory)
    waiting = memory.begin(branched(800), space=BASE_SPACE, max_match=1023)
    assert waiting is not None
    assert waiting.committed_len == 768
    for tokens in ([*range(first, first + 70)] for first in range(2000, 9000, 1000)):
        end(memory, compute(memory, tokens), tokens)
    audited(memory, waiting)
    memory.release(waiting, (), checkpoint=False, after_step=None)
    assert (trials, provisional(memory)) == (2, 1), "it was pinned, so the other one made room"
    audited(memory)


def test_trial_does_not_count_as_kept_while_swapped():
    """Swapped KV begins where the cache is expected to end, and trials make room before the request returns."""
    memory = make(range(5, 37), pages=200)
    kv = compute(memory, LONG)
    other = memory.begin(branched(600), space=BASE_SPACE, max_match=1023)
    assert other is not None
    assert memory.kept_blocks(kv) == 0
    launch(memory, other, 512, 1024)
    assert memory.kept_blocks(kv) == 512 // PAGE


def test_prompt_that_ends_at_a_trial_makes_it_an_anchor():
    memory = make(range(5, 37), pages=200)
    end(memory, compute(memory, LONG), LONG)
    same = branched(513)[:513]
    kv = memory.begin(same, space=BASE_SPACE, max_match=300)
    assert kv is not None
    launch(memory, kv, 256, 513)
    memory.commit(kv, 513)
    end(memory, kv, same)
    assert provisional(memory) == len(TRIALS) - 2, "one was used, and one is at the end of a prompt"
    audited(memory)


def test_aborted_prompt_gives_back_its_trials():
    memory = make(range(5, 37), pages=200)
    kv = memory.begin(LONG, space=BASE_SPACE, max_match=1023)
    assert kv is not None
    launch(memory, kv, 0, 1024)
    memory.release(kv, (), checkpoint=False, after_step=None)
    audited(memory)
    end(memory, compute(memory, LONG), LONG)
    assert provisional(memory) == len(TRIALS)


def test_model_that_computes_states_by_token_has_no_trials():
    memory = make(range(5, 37), pages=200, trials=False)
    end(memory, compute(memory, LONG), LONG)
    assert (provisional(memory), found(memory, LONG), found(memory, branched(900))) == (0, 960, 0)


def test_anchor_used_longest_ago_gives_its_slot():
    memory = make(range(5, 7))
    prompts = [[*range(first, first + 70)] for first in (0, 1000, 2000)]
    for tokens in prompts[:2]:
        end(memory, compute(memory, tokens), tokens)
    kv = memory.begin(prompts[0], space=BASE_SPACE, max_match=69)
    assert kv is not None
    launch(memory, kv, 64, 70)
    end(memory, kv, prompts[0])
    end(memory, compute(memory, prompts[2]), prompts[2])
    assert [found(memory, tokens) for tokens in prompts] == [64, 0, 64]
    audited(memory)


def test_anchor_that_a_request_begins_with_keeps_its_slot():
    memory = make(range(5, 6))
    first, second = [*range(70)], [*range(1000, 1070)]
    end(memory, compute(memory, first), first)
    waiting = memory.begin(first, space=BASE_SPACE, max_match=69)
    assert waiting is not None
    other = compute(memory, second)
    assert other.pending_anchors == []
    audited(memory, waiting, other)
    assert launch(memory, waiting, 64, 70).copies == ((5, waiting.row),)


def test_pages_that_the_cache_drops_take_their_anchor_along():
    memory, tokens = make(), [*range(100)]
    end(memory, compute(memory, tokens), tokens)
    assert memory.clear_cache() == 6
    audited(memory)
    assert found(memory, tokens) == 0


def test_aborted_request_releases_unattached_slot():
    memory, tokens = make(), [*range(100)]
    kv = memory.begin(tokens, space=BASE_SPACE, max_match=99)
    assert kv is not None
    launch(memory, kv, 0, 100)
    memory.release(kv, (), checkpoint=False, after_step=None)
    audited(memory)
    assert found(memory, tokens) == 0


def test_request_that_begins_again_continues_at_its_last_anchor():
    memory, tokens = make(), [*range(200)]
    kv = compute(memory, tokens[:150])
    again = memory.begin_again(kv, tokens, max_match=199)
    assert (again.committed_len, again.row) == (128, kv.row)
    audited(memory, again)


def test_copy_of_a_step_in_flight_is_no_anchor_yet():
    """The request ends with what the step before sampled, and the step that copies its state may still raise."""
    memory, tokens = make(), [*range(64)]
    kv = compute(memory, tokens)
    moves = launch(memory, kv, 64, 65, settles=False)
    assert moves.copies == ((kv.row, 5),)
    end(memory, kv, tokens)
    assert found(memory, [*tokens, 0]) == 0
    audited(memory)


def test_copies_of_steps_that_raised_are_no_anchors():
    memory, tokens = make(), [*range(100)]
    kv = compute(memory, tokens[:64])
    launch(memory, kv, 64, 100)
    again = memory.begin_again(kv, tokens, max_match=99)
    assert again.committed_len == 0
    audited(memory, again)


def test_audit_names_a_slot_without_an_owner():
    anchors = StateAnchors(SLOTS, page_size=PAGE, slot_bytes=SLOT_BYTES)
    anchors.take()
    assert anchors.problems(tree=[], pending=[], pins=Counter()) == [
        "states: slots with one owner are [6, 7], expected [5, 6, 7]"
    ]


@pytest.mark.parametrize(("page_size", "grain"), [(1, 64), (16, 64), (64, 64), (48, 192)])
def test_grain_holds_whole_blocks_and_whole_chunks(page_size, grain):
    assert StateAnchors((), page_size=page_size, slot_bytes=SLOT_BYTES).grain == grain


def test_received_state_continues_from_no_anchor():
    """Nothing pins what it would have continued from, and none of its steps has the states before."""
    memory, tokens = make(), [*range(150)]
    end(memory, compute(memory, tokens), tokens)
    kv = memory.begin(tokens, space=BASE_SPACE, max_match=149)
    assert kv is not None
    assert kv.continues_from is not None
    memory.expect_state(kv)
    assert memory.ensure(kv, 150)
    assert (kv.continues_from, kv.anchor_lens) == (None, [])
    memory.commit(kv, 150)
    assert memory.state_moves(9, [kv], [150], [151]) == ((), ())
    assert check_conservation(memory, [kv], ()).problems == ()
    memory.release(kv, tokens, checkpoint=True, after_step=None)
    assert check_conservation(memory, [], ()).problems == ()


def test_row_that_a_peer_may_write_is_no_other_requests():
    memory = make()
    kv = memory.begin([*range(20)], space=BASE_SPACE, max_match=19)
    assert kv is not None
    assert memory.ensure(kv, 20)
    pages = memory.detach(kv, keep_row=True)
    assert memory.rows.available == 3
    assert check_conservation(memory, [], pages, held_rows=[kv.row]).problems == ()
    [leaked] = check_conservation(memory, [], pages).problems
    assert leaked == f"row {kv.row} leaked: no request or hold has it"
    memory.rows.free(kv.row)
    assert memory.rows.available == 4


def test_slot_for_a_peer_waits_for_steps_that_used_it():  # [page-fence]
    memory, tokens = make(range(5, 6)), [*range(100)]
    end(memory, compute(memory, tokens), tokens)
    kv = memory.begin(tokens, space=BASE_SPACE, max_match=99)
    assert kv is not None
    assert launch(memory, kv, 64, 100, settles=False).copies == ((5, kv.row),)
    reserved = memory.reserve_state()
    assert reserved is not None
    slot, touched = reserved
    assert (slot, memory.untouched(touched), memory.reserve_state()) == (5, False, None)
    audited(memory, kv)
    memory.settled(memory.last_launched)
    assert memory.untouched(touched)
    memory.give_back_state(slot)
    audited(memory, kv)


def test_state_that_a_peer_has_written_becomes_an_anchor():
    memory, tokens = make(range(5, 6)), [*range(64)]
    reserved, pages = memory.reserve_state(), memory.reserve_pages(4)
    assert reserved is not None
    assert pages is not None
    inserted = memory.cache.insert(tokens, pages)
    memory.attach_state(inserted.pages[-1], reserved[0])
    memory.cache.unlock(inserted.lock)
    assert found(memory, [*tokens, 0]) == 64
    audited(memory)
