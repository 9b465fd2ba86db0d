"""Workers that are drained, or get another role, under load: every stream reads what it would have read."""

import asyncio
import os
import re
import signal
from collections import Counter

import pytest

from tandem_lab.bench.load import Lengths, fixed_workload
from tandem_services.cli.main import main
from tandem_testing.system_client import GREEDY, Sampling, SystemClient
from tandem_testing.system_streams import assert_unharmed, lost, moved, run_with, run_with_busiest
from tandem_testing.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("system")]

SEEDED = Sampling(temperature=1.0, seed=7)
LONG_ANSWERS = fixed_workload(Lengths(prompt=60, output=900, spread=0.4), 16, rate=None, seed=23)

SOME = 8
"""Of them speak when something happens: what others have left to say takes seconds."""

DECODE = ("decode-0", "decode-1")


EXIT_S = 60.0


def clean_exits(client: SystemClient) -> Counter[str]:
    """Worker → times that it has exited with status 0."""
    text = (client.system.run_dir / "up.out").read_text("utf-8", "replace")
    return Counter(re.findall(r"^tandem: (\S+) exited with status 0;", text, re.MULTILINE))


async def exits_0(client: SystemClient, worker_id: str, pid: int, *, before: Counter[str]) -> None:
    """Once more than `before`; and wait until it is back."""
    await until(
        lambda: clean_exits(client)[worker_id] == before[worker_id] + 1, EXIT_S, "exit status 0", client.system.logs
    )
    await client.all_ready(instead_of=[pid])
    await client.settled()


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(GREEDY, id="greedy", marks=pytest.mark.long("seeded streams also carry their state of sampling")),
        pytest.param(SEEDED, id="seeded"),
    ],
)
async def test_draining_decode_worker_migrates_streams_with_kv(fleet, reference, sampling):
    left: dict[str, int] = {}

    def leave(worker_id: str) -> None:
        left[worker_id] = fleet.system.service_pid(worker_id)
        os.kill(left[worker_id], signal.SIGTERM)

    exits, before = clean_exits(fleet), await moved(fleet)
    answers = await run_with_busiest(fleet, LONG_ANSWERS, sampling, leave, among=DECODE, speaking=SOME)
    await assert_unharmed(answers, reference, sampling)
    assert await moved(fleet) > before
    ((worker_id, pid),) = left.items()
    await exits_0(fleet, worker_id, pid, before=exits)


async def test_draining_prefill_worker_finishes_its_prompts(fleet, reference):
    leaver, exits = fleet.system.service_pid("prefill-0"), clean_exits(fleet)
    prompts = fixed_workload(Lengths(prompt=700, output=40, spread=0.3), 16, rate=None, seed=leaver)
    # The first two speak while the prompts of most others are still to be computed.
    answers = await run_with(fleet, prompts, GREEDY, lambda: os.kill(leaver, signal.SIGTERM), speaking=2)
    await assert_unharmed(answers, reference, GREEDY)
    await exits_0(fleet, "prefill-0", leaver, before=exits)


async def test_roles_change_under_load_without_a_restart(fleet, reference):
    moved_before, lost_before = await moved(fleet), await lost(fleet)
    changed: dict[str, int] = {}

    def order(worker_id: str, role: str) -> None:
        changed.setdefault(worker_id, fleet.system.engine_pid(worker_id))
        assert main(["ctl", fleet.system.workers[worker_id], "role", role]) == 0

    try:
        greedy = await run_with_busiest(
            fleet, LONG_ANSWERS, GREEDY, lambda busiest: order(busiest, "prefill"), among=DECODE, speaking=SOME
        )
        ((worker_id, engine),) = changed.items()
        assert await fleet.metric('tandem_worker_role{role="prefill"}', fleet.system.workers[worker_id]) == 1
        assert await moved(fleet) > moved_before
        seeded = await run_with(fleet, LONG_ANSWERS, SEEDED, lambda: order(worker_id, "both"))
    finally:
        for worker_id in changed:
            await asyncio.to_thread(order, worker_id, "decode")
    greedy += await fleet.streams(LONG_ANSWERS)
    await assert_unharmed(greedy, reference, GREEDY)
    await assert_unharmed(seeded, reference, SEEDED)
    assert await lost(fleet) == lost_before
    assert fleet.system.engine_pid(worker_id) == engine
    await fleet.settled()


async def test_streams_finish_on_draining_worker_without_capacity(fleet, reference):
    other = fleet.system.workers["decode-1"]
    assert await asyncio.to_thread(main, ["ctl", other, "pause"]) == 0

    async def withdrawn() -> bool:
        """In the gateway's view, too, which decides when Redis is slow."""
        view = (await fleet.get("/console/data/fleet"))["workers"]
        seen = {worker["worker_id"]: worker["state"] for worker in view}
        return seen["decode-1"] == "paused" and await fleet.metric("tandem_worker_offered", other) == 0

    await until(withdrawn, EXIT_S, "decode-1 is not offered")
    leaver, exits = fleet.system.service_pid("decode-0"), clean_exits(fleet)
    before = await moved(fleet)
    try:
        answers = await run_with(fleet, LONG_ANSWERS, GREEDY, lambda: os.kill(leaver, signal.SIGTERM))
    finally:
        assert await asyncio.to_thread(main, ["ctl", other, "resume"]) == 0
    await assert_unharmed(answers, reference, GREEDY)
    assert await moved(fleet) == before
    await exits_0(fleet, "decode-0", leaver, before=exits)
