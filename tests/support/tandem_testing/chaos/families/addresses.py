"""Addresses that vanish while the process behind them lives on, and are given to another (57 to 59).

Every worker has a network namespace of its own, and KV goes from one to the other over TCP. What a proxy cannot do
happens here: KV is cut off like everything else, and connections to what is gone are neither answered nor refused.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import count

import redis.asyncio

from tandem_testing.chaos.families.crashes import LONG_PROMPT, transferred
from tandem_testing.chaos.fleet import START_TIMEOUT_S, Shape
from tandem_testing.chaos.namespaces import Namespace, why_not
from tandem_testing.chaos.parts import Worker
from tandem_testing.chaos.scenario import PATIENCE_S, READY_TIMEOUT_S, SPEAK_TIMEOUT_S, Run, scenario
from tandem_testing.chaos.streams import Kind, Load
from tandem_testing.waiting import until

WIRED = Shape(wired=True)
GONE_S = 18.0
"""A worker that vanished is fenced after 14 s; 4 s later no page waits for it (docs/faults.md)."""
SLOW_LINE = 4_000_000
"""Bits per second: a prompt of `LONG_PROMPT` words takes seconds."""
UNDER_WAY = 300_000
"""Bytes over a slow line, after which a transfer is somewhere in its middle."""
GRANTED_TIMEOUT_S = 20.0
"""Longer than a transfer may stand still before the request that waits for it goes another way."""


def place_of(worker: Worker) -> Namespace:
    assert worker.place is not None, "the fleet is wired"
    return worker.place


async def keys_with(run: Run, text: str) -> list[str]:
    """Keys of Redis that have `text` in their names, and workers of the fleet that have it in theirs; without the
    verdict that it is over."""
    fleet, *_ = run.fleet.keys.shared
    async with redis.asyncio.Redis.from_url(run.fleet.redis_url) as client:
        keys = [key.decode() async for key in client.scan_iter(f"*{text}*") if b":fenced:" not in key]
        return keys + [name.decode() for name in await client.hkeys(fleet) if text in name.decode()]


async def incarnation_of(run: Run, worker: Worker) -> str:
    _, owner, _ = run.fleet.keys.shared
    async with redis.asyncio.Redis.from_url(run.fleet.redis_url) as client:
        claim = (await client.hget(owner, worker.id)).decode()
    return str(claim).partition(" ")[0]


async def forgotten(run: Run, victim: Worker, incarnation: str, *, since: float) -> None:
    """Nothing in Redis and at no other worker is left of an incarnation whose address has vanished at `since`, apart
    from pages of requests that are still under way."""
    left: dict[str, object] = {}

    async def nothing_left() -> bool:
        left.clear()
        left.update(dict.fromkeys(await keys_with(run, incarnation), "in Redis"))
        for worker in run.fleet.workers:
            if worker is victim:
                continue
            links = (await run.fleet.http.get(f"{worker.url}/links")).json()["links"]
            left.update({f"{worker.id} link": link for link in links if link["peer"] == incarnation})
            if pages := await run.fleet.metric(worker.url, "tandem_worker_kv_pages_quarantined"):
                left[f"{worker.id} quarantined"] = pages
        return not left

    await until(nothing_left, READY_TIMEOUT_S, f"nothing is left of {incarnation}", left.copy)
    took, allowed = run.now() - since, run.allowed(GONE_S)
    run.expect(took <= allowed, f"something was left of {victim.id} for {took:.1f} s, {allowed:.1f} s are allowed")
    run.notes.append(f"nothing was left of {victim.id} {took:.1f} s after its address had vanished")


async def pages_are_free(run: Run, victim: Worker) -> None:
    """Of all workers but `victim`, whose address has vanished. No request is under way any more."""
    ended, used = run.now(), dict[str, object]()

    async def none_used() -> bool:
        used.clear()
        for worker in run.fleet.workers:
            report = await run.fleet.audit(worker) or {"private_pages": "no audit", "held_pages": "no audit"}
            if worker is not victim and (report["private_pages"] or report["held_pages"]):
                used[worker.id] = report
        return not used

    await until(none_used, READY_TIMEOUT_S, "all pages are free", used.copy)
    took, allowed = run.now() - ended, run.allowed(GONE_S)
    run.expect(took <= allowed, f"pages were in use for another {took:.1f} s, {allowed:.1f} s are allowed")


async def comes_back(run: Run, victim: Worker, starts: int) -> None:
    """It lived all the time; with its address it learns that it is fenced, ends, and starts again."""
    run.expect(victim.part.alive and victim.part.starts == starts, f"{victim.id} ended without its address")
    log_size = victim.part.log_size()
    place_of(victim).plug()
    await until(lambda: victim.part.starts > starts, READY_TIMEOUT_S, "the zombie ends")
    run.expect("is fenced" in victim.part.log_text(log_size), "the zombie did not learn that it was fenced")
    await run.fleet.all_ready(READY_TIMEOUT_S)
    await run.works()


@scenario(57, shape=WIRED, why_not=why_not)
async def the_address_of_a_decode_worker_vanishes(run: Run) -> None:
    lost, gone_at = await run.lost_attempts(), 0.0
    incarnations: dict[str, str] = {worker.id: await incarnation_of(run, worker) for worker in run.fleet.workers}
    starts = {worker.id: worker.part.starts for worker in run.fleet.workers}
    victims: list[Worker] = []

    async def fault(load: Load) -> None:
        nonlocal gone_at
        victims.append(await run.busiest_decode(load))
        place_of(victims[0]).unplug()
        gone_at = run.now()
        watching.create_task(forgotten(run, victims[0], incarnations[victims[0].id], since=gone_at))
        # Some of these are sent to an address without a listener, and KV of some to there.
        load.send(run.asks(Kind.GREEDY, prompt_words=200, tokens=32, count=8, first=400))

    async with asyncio.TaskGroup() as watching:
        speaking = max(2, run.scale.streams // 3)
        answers = await run.under_fault(run.asks(Kind.GREEDY, Kind.SEEDED), fault, speaking=speaking)
    await run.sample("decode's address vanishes", answers, after=gone_at, of=lambda outcomes: "worker_lost" in outcomes)
    run.expect(await run.lost_attempts() > lost, "no stream was on the worker whose address vanished")
    (victim,) = victims
    await pages_are_free(run, victim)
    await comes_back(run, victim, starts[victim.id])


@scenario(58, shape=WIRED, why_not=why_not)
async def the_address_of_a_prefill_worker_vanishes_during_a_transfer(run: Run) -> None:
    await kv_goes_over_the_wire(run)
    victim, others = run.fleet.of_role("prefill")[0], run.fleet.workers[1:]
    lost, incarnation = await run.lost_attempts(), await incarnation_of(run, victim)
    starts = {worker.id: worker.part.starts for worker in run.fleet.workers}
    place = place_of(victim)
    place.slow_down(SLOW_LINE)
    carried = place.carried()
    async with asyncio.TaskGroup() as watching, run.load() as load:
        asks = run.asks(Kind.PLAIN, tokens=24, prompt_words=LONG_PROMPT, count=max(6, run.scale.streams // 4))
        load.send(asks)
        await until(lambda: place.carried() - carried > UNDER_WAY, SPEAK_TIMEOUT_S, "KV is under way", place.carried)
        place.unplug()
        since = run.now()
        watching.create_task(forgotten(run, victim, incarnation, since=since))
        # Requests give up their pages once it is reported as gone. It might still write to them.
        await until(lambda: granted_pages_wait(run), GRANTED_TIMEOUT_S, "pages that it was granted wait for it")
        await run.judge(await load.gathered(), after=since)
    run.expect(await run.lost_attempts() > lost, "no request was on the worker whose address vanished")
    await pages_are_free(run, victim)
    for worker in others:
        run.expect(worker.part.starts == starts[worker.id], f"{worker.id} ended with its peer")
    await comes_back(run, victim, starts[victim.id])


async def granted_pages_wait(run: Run) -> bool:
    """Whether a decode worker keeps pages that belong to no request any more, as their writer may still write to
    them."""
    reports = [await run.fleet.audit(worker) for worker in run.fleet.of_role("decode")]
    return any(report is not None and report["held_pages"] for report in reports)


async def kv_goes_over_the_wire(run: Run) -> None:
    """No shared memory: what engines count as transferred, the ports of their senders have seen."""
    senders = [place_of(worker) for worker in run.fleet.of_role("prefill")]
    before, carried = await kv_bytes(run), sum(place.carried() for place in senders)
    await transferred(run, first=700)
    await until(lambda: _is_more(run, before), PATIENCE_S, "bytes of KV are counted")
    moved, seen = await kv_bytes(run) - before, sum(place.carried() for place in senders) - carried
    run.expect(seen >= moved, f"{moved:.0f} bytes of KV moved, of which only {seen} were on the wire")
    run.notes.append(f"{moved / 1e6:.1f} MB of KV moved, {seen / 1e6:.1f} MB were on the wire")


async def kv_bytes(run: Run) -> float:
    return await run.fleet.worker_metric("kv_transfer_bytes_total", "decode")


async def _is_more(run: Run, before: float) -> bool:
    return await kv_bytes(run) > before


@scenario(59, shape=WIRED, why_not=why_not)
async def another_worker_has_the_address_of_a_dead_one(run: Run) -> None:
    """The old process lives on, without it. Its name, too, is another, as a new pod's is."""
    for role in ("decode", "prefill"):
        run.salt += f"-{role}"
        incarnations = {worker.id: await incarnation_of(run, worker) for worker in run.fleet.workers}
        victims: list[Worker] = []

        async def fault(load: Load, role: str = role, victims: list[Worker] = victims) -> None:
            victims.append(await run.busiest_decode(load) if role == "decode" else run.fleet.of_role("prefill")[0])
            place_of(victims[0]).unplug()

        await run.under_fault(run.asks(Kind.GREEDY, prompt_words=120), fault, speaking=max(2, run.scale.streams // 3))
        (victim,) = victims
        incarnation = incarnations[victim.id]
        await replacement_serves(run, victim)
        # A machine on which replacements start fast has one serving before the lease of the other is over.
        await until(partial(_is_forgotten, run, incarnation), READY_TIMEOUT_S, f"{incarnation} is fenced")
        await comes_back(run, victim, victim.part.starts)


async def _is_forgotten(run: Run, incarnation: str) -> bool:
    return not await keys_with(run, incarnation)


async def replacement_serves(run: Run, victim: Worker) -> None:
    """A worker of another name at the address and the ports of `victim` serves its first requests at once."""
    assert run.fleet.switch is not None
    had = victim.settings
    replacement = await run.fleet.add_worker(
        *(f"replacement-{victim.id}", victim.role),
        kept=False,
        place=run.fleet.switch.place(place_of(victim).address),
        request_port=had.request_port,
        peer_port=had.peer_port,
        health_port=had.health_port,
    )
    try:
        await until(
            lambda: run.fleet.is_ready(replacement.url),
            START_TIMEOUT_S,
            "the replacement is ready",
            replacement.part.log_text,
        )
        lost, first, sent = await run.lost_attempts(), count(600, 8), 0
        while not sent:
            answers = await run.works(8, first=next(first))
            attempts = [attempt for answer in answers for attempt in await run.attempts(answer)]
            sent = sum(str(attempt[victim.role]).startswith(f"{replacement.id}@") for attempt in attempts)
        run.expect(await run.lost_attempts() == lost, "requests failed after the replacement had come")
        run.expect(victim.part.alive, "the worker whose address it was has ended")

        async def counted() -> float:
            accepted = await run.fleet.metric(replacement.url, "tandem_worker_requests_total")
            return accepted + await run.fleet.metric(replacement.url, "tandem_worker_requests_refused_total")

        await until(lambda: _at_least(counted, sent), PATIENCE_S, "its requests are counted")
        run.expect(
            await counted() == sent, f"{replacement.id} got {await counted():g} requests, {sent} were meant for it"
        )
        run.notes.append(f"{replacement.id} served {sent} requests, and was asked for no other")
    finally:
        await run.fleet.remove_worker(replacement)
        place_of(replacement).end()


async def _at_least(count_of: Callable[[], Awaitable[float]], wanted: float) -> bool:
    return await count_of() >= wanted
