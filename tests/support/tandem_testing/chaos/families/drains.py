"""Workers that are drained under load (36)."""

import signal

from tandem_testing.chaos.parts import Worker
from tandem_testing.chaos.scenario import READY_TIMEOUT_S, Run, scenario
from tandem_testing.chaos.streams import Kind, Load
from tandem_testing.waiting import until

GRACE_S = 45.0
"""A pod's grace period: the worker's drain time and the end of its engine fit into it."""
BUSY = ("num_requests_running", "num_requests_waiting", "num_requests_inflight")


async def busiest_prefill(run: Run) -> Worker:
    """By what prefill workers reported half a second ago."""
    loads = {
        worker.id: sum([await run.fleet.metric(worker.url, f"tandem_worker_{gauge}") for gauge in BUSY])
        for worker in run.fleet.of_role("prefill")
    }
    return max(run.fleet.of_role("prefill"), key=lambda worker: loads[worker.id])


@scenario(36)
async def workers_are_drained_under_load(run: Run) -> None:
    for role in ("decode", "prefill"):
        victims: list[Worker] = []
        reported = 0.0

        async def fault(load: Load, role: str = role, victims: list[Worker] = victims) -> None:
            nonlocal reported
            victims.append(await run.busiest_decode(load) if role == "decode" else await busiest_prefill(run))
            victims[0].part.send(signal.SIGTERM)
            reported = run.now()

        run.salt += f"-{role}"
        # Streams have begun when they are to move, and prompts have not been computed when their worker is to leave.
        words, speaking = (60, 2 * run.scale.streams // 3) if role == "decode" else (500, 2)
        wanted = run.asks(Kind.GREEDY, Kind.SEEDED, Kind.PENALIZED, prompt_words=words)
        starts = {worker.id: worker.part.starts for worker in run.fleet.workers}
        # A worker that starts takes seconds of processors that the remaining workers need here, and have in a cluster.
        with run.fleet.no_restarts():
            answers = await run.under_fault(wanted, fault, speaking=max(2, speaking))
        if role == "decode":
            begun = [answer for answer in answers if answer.received_at and answer.received_at[0] < reported]
            await run.sample("drain, moved", begun, after=reported, of=lambda outcomes: "moved" in outcomes)
            await run.sample("drain, not moved", begun, after=reported, of=lambda outcomes: outcomes == {"finished"})
        (victim,) = victims
        await until(lambda: victim.part.starts > starts[victim.id], READY_TIMEOUT_S, f"{victim.id} has left")  # noqa: B023
        left = victim.part.ended_at - reported
        run.expect(victim.part.last_status == 0, f"{victim.id} exited with status {victim.part.last_status}")
        run.expect(left <= run.allowed(GRACE_S), f"{victim.id} was gone only after {left:.0f} s")
        run.notes.append(f"{victim.id} had left {left:.1f} s after SIGTERM")
        await run.fleet.all_ready(READY_TIMEOUT_S)
