"""Prompts that are held up on the way to the writer's queue, or overtaken there by another tenant, while their receiver
has granted pages to them.

The receiver serves in order of arrival. If those that come later filled the writer's memory by then, they would
wait for the receiver's, which waits for the prompt that has no room to be computed any more.
"""

import pytest

from tandem_engine.config import HostConfig
from tandem_testing.disagg_pair import Pair, make_pair
from tandem_testing.memory_storage import MemoryStorage
from tandem_testing.scheduler_builders import make_engine, make_message
from tandem_testing.toy_grammar import ToyGrammars, toy_grammar

LONG = tuple(range(1, 33))
"""Eight of fourteen pages."""
LATER = {f"later{number}": tuple(range(40 + number, 60 + number)) for number in range(3)}
"""Five pages each: two of them fill what is left."""


def submit_later(pair: Pair) -> None:
    for rid, prompt in LATER.items():
        pair.pass_time(0.01)
        pair.submit(rid, prompt)


def finish_soon(pair: Pair) -> None:
    """All complete within a fraction of the time after which a circle is broken."""
    pair.run(max_turns=200, seconds_per_turn=0.01)
    for rid in ("late", *LATER):
        assert pair.decode.tokens(rid) == pair.expected(rid)
    pair.assert_clean()


@pytest.mark.parametrize("overlap", [False, True])
def test_late_grammar_finds_room_for_its_prompt(overlap):
    grammars, spec = ToyGrammars(hold=True), toy_grammar()
    pair = make_pair(usable_pages=14, enable_overlap=overlap, prefill={"grammars": grammars})
    pair.submit("late", LONG, grammar=spec)
    submit_later(pair)
    pair.turn(20)
    grammars.finish(spec)
    finish_soon(pair)


@pytest.mark.parametrize("overlap", [False, True])
def test_prompt_that_waits_for_storage_finds_room(overlap):
    storage = MemoryStorage()
    below = {"host_pages": 16, "host": HostConfig(enable_cache=True), "storage": storage}
    earlier = make_engine(**below)
    earlier.add(make_message("earlier", LONG, max_tokens=2))
    earlier.run()
    earlier.step(4)
    storage.at_once = False
    pair = make_pair(usable_pages=14, enable_overlap=overlap, prefill=below)
    pair.submit("late", LONG)
    submit_later(pair)
    pair.turn(20)
    assert "late" not in pair.decode.engine.received
    storage.run()
    finish_soon(pair)


def test_late_grammar_finds_a_row():
    grammars, spec = ToyGrammars(hold=True), toy_grammar()
    pair = make_pair(usable_pages=64, prefill={"grammars": grammars, "max_rows": 2}, decode={"max_rows": 1})
    pair.submit("late", LONG, grammar=spec)
    submit_later(pair)
    pair.turn(20)
    grammars.finish(spec)
    finish_soon(pair)


def test_others_are_served_while_there_is_room_for_all():
    grammars, spec = ToyGrammars(hold=True), toy_grammar()
    pair = make_pair(usable_pages=32, prefill={"grammars": grammars})
    pair.submit("late", LONG, grammar=spec)
    submit_later(pair)
    pair.turn(40)
    for rid in LATER:
        assert pair.decode.tokens(rid) == pair.expected(rid)
    grammars.finish(spec)
    finish_soon(pair)


def test_choice_that_followed_does_not_overtake_those_before_it():
    """Their receiver grants in order of arrival, and what the choice holds until then could be all there is."""
    pair = make_pair(usable_pages=14, chunked_prefill_size=4, max_prefill_tokens=4)
    choices, other = tuple(range(1, 17)), tuple(range(40, 66))
    for rid, prompt, group in (
        ("first", choices, "g"),
        ("before", other, ""),
        ("a", choices, "g"),
        ("b", choices, "g"),
    ):
        pair.pass_time(0.01)
        pair.submit(rid, prompt, group=group)
    while "first" not in pair.prefill.engine.received:
        pair.turn()
    assert [req.rid for req in pair.prefill.engine.scheduler.queues.waiting] == ["before", "a", "b"]
    pair.run(max_turns=300, seconds_per_turn=0.01)
    for rid in ("first", "before", "a", "b"):
        assert pair.decode.tokens(rid) == pair.expected(rid)
    pair.assert_clean()


@pytest.mark.parametrize(("pages", "order"), [(14, ["big", "big2", "small"]), (40, ["big", "small", "big2"])])
def test_tenant_overtakes_while_others_find_room(pages, order):
    """In tight memory it does not: its pages would be those that the overtaken prompt needs."""
    pair = make_pair(usable_pages=pages, chunked_prefill_size=8, max_prefill_tokens=8, shared_prefill_tokens=8)
    prompts = {"big": LONG, "big2": tuple(range(33, 81)), "small": tuple(range(40, 52))}
    for rid, prompt in prompts.items():
        pair.pass_time(0.01)
        pair.submit(rid, prompt, tenant=rid.rstrip("2"))
        pair.turn()
    found: list[str] = []
    for _ in range(300):
        pair.pass_time(0.01)
        pair.turn()
        received = pair.prefill.engine.received
        found += [rid for rid in prompts if rid in received and rid not in found]
    assert found == order
    pair.run(max_turns=200, seconds_per_turn=0.01)
    for rid in prompts:
        assert pair.decode.tokens(rid) == pair.expected(rid)
    pair.assert_clean()


def test_tenant_gives_up_its_turn_where_rows_are_few():
    """Prompts that came earlier wait behind it in the queue, for more rows than there are."""
    pair = make_pair(usable_pages=64, shared_prefill_tokens=8, prefill={"max_rows": 2})
    prompts = {f"big{number}": tuple(range(1 + number, 33 + number)) for number in range(4)}
    prompts["small"] = tuple(range(50, 60))
    for rid, prompt in prompts.items():
        pair.pass_time(0.001)
        pair.submit(rid, prompt, tenant=rid.rstrip("0123"))
    pair.run(max_turns=200, seconds_per_turn=0.01)
    for rid in prompts:
        assert pair.decode.tokens(rid) == pair.expected(rid)
    pair.assert_clean()
