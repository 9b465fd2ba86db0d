"""What the router chooses with a real Redis: locality, pairing, exclusion, spreading."""

import asyncio
from collections import Counter
from functools import partial

import pytest

from tandem_engine.base.release import RELEASE, WINDOW
from tandem_engine.config import Role
from tandem_engine.messages.control import ServedAdapter
from tandem_services.router import probing
from tandem_services.router.decision import NoWorkersError, Placement, Source
from tandem_services.router.redis_functions import FunctionLibrary
from tandem_services.router.registry import ROW, WorkerState
from tandem_testing.router_builders import (
    PAGE,
    chain_of,
    make_link,
    make_load,
    make_query,
    make_record,
    patient_router,
)

PROMPT = tuple(range(20 * PAGE))
PREFILL, DECODE = Role.PREFILL, Role.DECODE


query = partial(make_query, token_ids=PROMPT)


async def test_prefill_and_a_decode_worker_are_paired(fleet, router):
    await fleet.join(router, make_record("p", Role.PREFILL), make_record("d", Role.DECODE))
    choice = await router.choose(query())
    assert choice.source is Source.REDIS
    assert choice.prefill is not None
    assert (choice.prefill.worker_id, choice.decode.worker_id) == ("p", "d")
    assert {term.name for term in choice.terms} == {
        "prefix_fetch",
        "host_load",
        "prefill_queue",
        "prefill_compute",
        "prefill_stall",
        "adapter_load",
        "transfer",
        "decode_load",
        "decode_room",
    }


async def test_cached_prefix_is_preferred_until_queue_costs_more(fleet, router):
    home, other = make_record("home"), make_record("other")
    await fleet.join(router, home, other)
    await fleet.cache(home, chain_of(PROMPT))
    choice = await router.choose(query())
    assert choice.decode.worker_id == "home"
    assert choice.matched_tokens == len(PROMPT)
    await fleet.beat(make_record("home", load=make_load(queue_tokens=4000)))
    await router.release(choice)
    assert (await router.choose(query())).decode.worker_id == "other"


async def test_prompts_of_another_tenant_match_nothing(fleet, router):
    home = make_record("home")
    await fleet.join(router, home)
    await fleet.cache(home, chain_of(PROMPT, salt="a"))
    assert (await router.choose(query(cache_salt="a"))).matched_tokens == len(PROMPT)
    assert (await router.choose(query(cache_salt="b"))).matched_tokens == 0


async def test_only_workers_with_the_adapter_are_chosen(fleet, router):
    adapter = ServedAdapter(name="sql", digest="0a" * 16, rank=8, root="sql")
    having = [make_record(name, role, adapters={"sql": adapter}) for name, role in (("p2", PREFILL), ("d2", DECODE))]
    await fleet.join(router, make_record("p1", PREFILL), make_record("d1", DECODE), *having)
    await fleet.cache(make_record("p1", PREFILL), chain_of(PROMPT))
    asked = query(adapter=bytes.fromhex(adapter.digest))
    for _ in range(8):
        choice = await router.choose(asked)
        assert choice.prefill is not None
        assert (choice.source, choice.prefill.worker_id, choice.decode.worker_id) == (Source.REDIS, "p2", "d2")
        assert choice.matched_tokens == 0
        await router.release(choice)
    with pytest.raises(NoWorkersError):
        await router.choose(query(adapter=b"b" * 16))


async def test_decode_worker_that_lacks_little_computes_alone(fleet, router):
    fast = make_load(prefill_rate=10_000)
    decode = make_record("d", Role.DECODE, load=fast)
    await fleet.join(router, make_record("p", Role.PREFILL, load=fast), decode)
    await fleet.cache(decode, chain_of(PROMPT)[:-1])
    choice = await router.choose(query())
    assert choice.prefill is None
    assert choice.matched_tokens == len(PROMPT) - PAGE


async def test_decode_worker_without_prefill_workers_serves_alone(fleet, router):  # [decode-computes-prompts]
    await fleet.join(router, make_record("d", Role.DECODE))
    assert (await router.choose(query())).prefill is None


async def test_prefill_worker_alone_cannot_serve(fleet, router):
    await fleet.join(router, make_record("p", Role.PREFILL))
    with pytest.raises(NoWorkersError) as caught:
        await router.choose(query())
    assert caught.value.retry_after > 0


async def test_workers_of_different_geometry_are_never_paired(fleet, router):  # [same-kind-paired]
    await fleet.join(
        router,
        make_record("p-old", Role.PREFILL, compat_hash="old"),
        make_record("d-new", Role.DECODE, compat_hash="new"),
        make_record("d-old", Role.DECODE, compat_hash="old", load=make_load(sequences=20)),
    )
    for number in range(40):
        choice = await router.choose(query(token_ids=tuple(range(number, number + 100))))
        # However idle the odd one is: its weights may be others.
        assert {choice.decode.compat_hash} | ({choice.prefill.compat_hash} if choice.prefill else set()) == {"old"}
        await router.release(choice)


async def test_old_release_decode_worker_serves_alone_in_rollout(fleet, router):
    await fleet.join(
        router,
        make_record("p-new", Role.PREFILL, compat_hash="new"),
        make_record("d-old", Role.DECODE, compat_hash="old"),
    )
    choice = await router.choose(query())
    assert (choice.decode.worker_id, choice.prefill) == ("d-old", None)


async def test_resumed_request_requires_equal_compat_hash(fleet, router):  # [same-kind-paired]
    await fleet.join(
        router,
        make_record("new", compat_hash="new"),
        make_record("old", compat_hash="old", load=make_load(sequences=20)),
    )
    for _ in range(10):
        choice = await router.choose(query(compat_hash="old"))
        assert choice.decode.worker_id == "old"
        await router.release(choice)
    with pytest.raises(NoWorkersError):
        await router.choose(query(compat_hash="older"))
    # Since the last view, and cheaper than the one it knows.
    await fleet.beat(make_record("newest", compat_hash="newest"))
    assert (await router.choose(query(compat_hash="old"))).decode.worker_id == "old"


async def test_excluded_and_dead_workers_are_not_chosen(fleet, router):
    await fleet.join(router, make_record("a"), make_record("b"), make_record("c"))
    router.mark_dead("c@1")
    for _ in range(10):
        assert (await router.choose(query(exclude=frozenset({"a@1"})))).decode.worker_id == "b"
    assert {worker.worker_id for worker in router.workers()} == {"a", "b"}


async def test_excluding_all_workers_raises_no_workers_error(fleet, router):
    await fleet.join(router, make_record("a"))
    with pytest.raises(NoWorkersError):
        await router.choose(query(exclude=frozenset({"a@1"})))


async def test_query_for_few_workers_gets_no_other(fleet, router):
    workers = [make_record(f"w{number}") for number in range(4)]
    await fleet.join(router, *workers)
    await fleet.cache(workers[0], chain_of(PROMPT))
    for name in ("w1@1", "w3@1"):
        choice = await router.choose(query(only=frozenset({name})))
        assert (choice.source, choice.decode.incarnation) == (Source.REDIS, name)
    with pytest.raises(NoWorkersError):
        await router.choose(query(only=frozenset({"w2@1"}), exclude=frozenset({"w2@1"})))


@pytest.mark.parametrize("role", [PREFILL, Role.BOTH])
async def test_worker_that_measured_itself_too_slow_is_probed(fleet, router, monkeypatch, role):
    slow = make_record("slow", role, load=make_load(prefill_rate=1.0))
    others = [make_record(f"w{number}", role) for number in range(3)]
    if role is PREFILL:
        others.append(make_record("mate", DECODE))
    await fleet.join(router, slow, *others)
    monkeypatch.setattr(probing, "SHARE", 0.0)
    for _ in range(8):
        choice = await router.choose(query())
        assert slow.view not in (choice.decode, choice.prefill)
        await router.release(choice)
    monkeypatch.setattr(probing, "SHARE", 1.0)
    choices = [await router.choose(query()) for _ in range(3)]
    assert [slow.view in (choice.decode, choice.prefill) for choice in choices] == [True, False, False]


async def test_busy_suspect_gets_no_probe(fleet, router, monkeypatch):
    monkeypatch.setattr(probing, "SHARE", 1.0)
    slow = make_record("slow", load=make_load(prefill_rate=1.0, queue_tokens=100))
    await fleet.join(router, slow, *(make_record(f"w{number}") for number in range(3)))
    assert (await router.choose(query())).decode.worker_id != "slow"


async def test_probe_of_a_worker_that_has_left_degrades_no_request(fleet, router, monkeypatch):
    """The view still has it."""
    monkeypatch.setattr(probing, "SHARE", 1.0)
    slow = make_record("slow", PREFILL, load=make_load(prefill_rate=1.0))
    others = [make_record(f"p{number}", PREFILL) for number in range(3)]
    await fleet.join(router, slow, *others, make_record("mate", DECODE))
    await fleet.beat(make_record("slow", PREFILL, state=WorkerState.DRAINING, load=make_load(prefill_rate=1.0)))
    choice = await router.choose(query())
    assert choice.prefill is not None
    assert (choice.prefill.worker_id[0], choice.placement) == ("p", Placement.PAIR)


async def test_unknown_model_or_too_long_prompt_raises_no_workers(fleet, router):
    await fleet.join(router, make_record("a", context_length=len(PROMPT)))
    for bad in (query(), query(model="other", token_ids=(1, 2))):
        with pytest.raises(NoWorkersError):
            await router.choose(bad)


async def test_burst_spreads_over_equal_workers_across_gateways(server, fleet, router):  # llm-d-router 2515
    second = patient_router(server, seed=2)
    await second.start()
    records = [make_record(f"p{n}", Role.PREFILL) for n in range(4)]
    records += [make_record(f"d{n}", Role.DECODE) for n in range(4)]
    await fleet.join(router, *records)
    await second.refresh()
    prefills: Counter[str] = Counter()
    decodes: Counter[str] = Counter()
    for number in range(20):
        for gateway in (router, second):
            choice = await gateway.choose(query(token_ids=tuple(range(number, number + 300))))
            assert choice.prefill is not None
            prefills[choice.prefill.worker_id] += 1
            decodes[choice.decode.worker_id] += 1
    await second.stop()
    assert max(prefills.values()) - min(prefills.values()) <= 1, prefills
    assert max(decodes.values()) - min(decodes.values()) <= 1, decodes


async def test_released_load_no_longer_weighs(fleet, router):
    await fleet.join(router, make_record("a"))
    first = await router.choose(query())
    await router.release(first)
    await router.release(first)
    second = await router.choose(query())
    assert {t.name: t.seconds for t in second.terms}["prefill_queue"] == 0


async def test_releases_of_one_iteration_are_one_call_of_redis(fleet, router, monkeypatch):
    await fleet.join(router, make_record("a"), make_record("b"))
    choices = [await router.choose(query()) for _ in range(5)]
    called, call = [], FunctionLibrary.call

    async def counted(library, function, *args):
        called.append(function)
        return await call(library, function, *args)

    monkeypatch.setattr(FunctionLibrary, "call", counted)
    for choice in (*choices, choices[0]):
        router.release_soon(choice)
    await asyncio.sleep(0)
    assert called == ["release"]
    choice = await router.choose(query())
    assert {t.name: t.seconds for t in choice.terms}["prefill_queue"] == 0, "all of them are given back"


async def test_report_takes_the_place_of_reservations(fleet, router):
    await fleet.join(router, make_record("a"))
    await router.choose(query())
    queued = {t.name: t.seconds for t in (await router.choose(query())).terms}["prefill_queue"]
    assert queued == pytest.approx(len(PROMPT) / 1000)
    # A report of now covers all that was reserved before the current quarter second.
    fleet_row = fleet.keys.prefix + "fleet"
    row = await fleet.client.command("HGET", fleet_row, "a@1")
    assert isinstance(row, bytes)
    assert len(row) > 106
    await fleet.beat(make_record("a"), report_age_s=-1.0)
    third = {t.name: t.seconds for t in (await router.choose(query())).terms}["prefill_queue"]
    assert third == 0


async def test_worker_without_room_is_the_last_resort(fleet, router):
    full = make_record("full", load=make_load(room_tokens=10))
    busy = make_record("busy", load=make_load(sequences=60))
    await fleet.join(router, full, busy)
    assert (await router.choose(query())).decode.worker_id == "busy"
    router.mark_dead("busy@1")
    assert (await router.choose(query())).decode.worker_id == "full"


async def test_migration_selects_decode_worker_with_capacity(fleet, router):
    leaving = make_record("d1", Role.DECODE)
    small = make_record("d2", Role.DECODE, load=make_load(room_tokens=100))
    roomy = make_record("d3", Role.DECODE, load=make_load(sequences=5))
    await fleet.join(router, make_record("p", Role.PREFILL), leaving, small, roomy)
    choice = await router.relocate(query(), leaving.view)
    assert (choice.decode.worker_id, choice.prefill) == ("d3", leaving.view)
    await router.release(choice)


@pytest.mark.parametrize(
    "other",
    [
        make_record("d2", Role.DECODE, load=make_load(room_tokens=100)),
        make_record("d2", Role.DECODE, load=make_load(sequences=64)),
        make_record("d2", Role.DECODE, compat_hash="other weights"),
        make_record("p", Role.PREFILL),
    ],
    ids=["no pages", "no seat", "other KV", "no decoder"],
)
async def test_migration_without_capable_worker_raises_no_workers(fleet, router, other):
    leaving = make_record("d1", Role.DECODE)
    await fleet.join(router, leaving, other)
    with pytest.raises(NoWorkersError):
        await router.relocate(query(), leaving.view)


async def test_worker_that_registered_since_the_last_view_is_found(fleet, router):
    await fleet.join(router, make_record("a", load=make_load(sequences=50)))
    await fleet.beat(make_record("b"))
    assert (await router.choose(query())).decode.worker_id == "b"


async def test_short_and_empty_prompts_can_be_routed(fleet, router):
    await fleet.join(router, make_record("a"))
    for tokens in ((), (1,), tuple(range(PAGE))):
        assert (await router.choose(query(token_ids=tokens))).decode.worker_id == "a"


async def test_worker_lost_during_redis_call_is_not_chosen(fleet, router):
    await fleet.join(router, make_record("d1"), make_record("d2", load=make_load(queue_tokens=100_000)))
    choosing = asyncio.create_task(router.choose(query()))
    await asyncio.sleep(0)
    router.mark_dead("d1@1")
    assert (await choosing).decode.worker_id == "d2"


async def test_fast_link_is_preferred_and_a_broken_one_avoided(fleet, router):
    decode = make_record("d", Role.DECODE)
    near = make_record("near", Role.PREFILL, links=(make_link(decode, 1e9),))
    for link in (make_link(decode, 1e6), make_link(decode, 1e9, broken=True)):
        far = make_record("far", Role.PREFILL, links=(link,))
        await fleet.join(router, decode, near, far)
        for _ in range(5):
            choice = await router.choose(query())
            assert choice.prefill is not None
            assert choice.prefill.worker_id == "near"
            await router.release(choice)


async def test_unmeasured_link_costs_the_typical_rate_of_its_worker(fleet, router):
    decode, gone = make_record("d", Role.DECODE, load=make_load(sequences=2)), make_record("gone", Role.DECODE)
    slow = make_record("slow", Role.PREFILL, links=(make_link(gone, 1e6),), load=make_load(transfer_rate=1e6))
    await fleet.join(router, decode, slow)
    choice = await router.choose(query())
    terms = {term.name: term.seconds for term in choice.terms}
    assert choice.placement is Placement.PAIR
    assert terms["transfer"] == pytest.approx(0.002 + len(PROMPT) * 1000 / 1e6)


async def test_link_rates_are_replaced_per_heartbeat_and_deregistered(fleet, router, server):
    decode = make_record("d", Role.DECODE)
    await fleet.join(router, decode, make_record("p", Role.PREFILL, links=(make_link(decode, 1e6),)))
    assert server.command("GET", "tandem:{default}:links:p@1").splitlines()[-1].startswith("d@1 ")
    await fleet.join(router, make_record("p", Role.PREFILL))
    assert server.command("EXISTS", "tandem:{default}:links:p@1").strip() == ":0"
    await fleet.join(router, make_record("p", Role.PREFILL, links=(make_link(decode, 1e6),)))
    await fleet.registry.deregister("p@1")
    assert server.command("EXISTS", "tandem:{default}:links:p@1").strip() == ":0"


@pytest.mark.parametrize(
    "malformed", [("SET", "x"), ("HSET", "d@1", "nan"), ("HSET", "d@1", "-1"), ("HSET", "d@1", "1e9")]
)
async def test_malformed_link_rates_are_ignored(fleet, router, server, malformed):
    await fleet.join(router, make_record("d", Role.DECODE), make_record("p", Role.PREFILL))
    command, *arguments = malformed
    server.command(command, "tandem:{default}:links:p@1", *arguments)
    choice = await router.choose(query())
    assert choice.source is Source.REDIS
    assert choice.prefill is not None
    transfer = next(term.seconds for term in choice.terms if term.name == "transfer")
    assert transfer < 1.0


async def test_long_prefill_queue_selects_local_prefill(fleet, router):
    decode = make_record("d", Role.DECODE)
    await fleet.join(router, decode, make_record("p", Role.PREFILL, load=make_load(queue_tokens=5000)))
    choice = await router.choose(query())
    assert (choice.prefill, choice.placement) == (None, Placement.LOCAL)
    await router.release(choice)
    await fleet.join(router, make_record("p", Role.PREFILL))
    assert (await router.choose(query())).placement is Placement.PAIR


async def test_without_a_prefill_worker_a_choice_is_degraded(fleet, router):  # [decode-computes-prompts]
    await fleet.join(router, make_record("d", Role.DECODE))
    assert (await router.choose(query())).placement is Placement.DEGRADED
    assert router.counters.placements[Placement.DEGRADED] == 1


async def test_worker_outside_the_window_gets_no_reservation(fleet, router):
    later = make_record("later", release=RELEASE + WINDOW + 1)
    await fleet.join(router, later)
    with pytest.raises(NoWorkersError):
        await router.choose(query())
    await fleet.join(router, make_record("ours"))
    await fleet.cache(later, chain_of(PROMPT))
    for _ in range(4):
        assert (await router.choose(query())).decode.worker_id == "ours"
    row = await fleet.client.command("HGET", fleet.keys.shared[0], later.view.incarnation)
    assert len(row) == ROW.size + 16, "a reservation for it stands in its row"


async def test_worker_of_another_encoding_gets_no_reservation(fleet, router):
    later = make_record("later", encoding="2" * 32)
    await fleet.join(router, later, make_record("ours", encoding="1" * 32))
    router.require_encoding("1" * 32)
    await fleet.cache(later, chain_of(PROMPT))
    for _ in range(4):
        assert (await router.choose(query())).decode.worker_id == "ours"
    row = await fleet.client.command("HGET", fleet.keys.shared[0], later.view.incarnation)
    assert len(row) == ROW.size + 16, "a reservation for it stands in its row"
