"""Run a workload against a server: fixed concurrency, or arrivals in time.

Content check: before the run every distinct (prompt, length) is answered once, one at a time, by the
reference server; in the run each greedy stream must repeat that text exactly.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tandem_services.common.errors import RemoteError
from tandem_services.loadgen.stream_client import Measurement, Target
from tandem_services.loadgen.workload import Prompt, RequestSpec

Progress = Callable[[Measurement], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    measurements: list[Measurement]
    seconds: float


async def at_concurrency(target: Target, specs: Sequence[RequestSpec], concurrency: int, done: Progress) -> RunResult:
    """`concurrency` clients take the next request as soon as their last one ends."""
    waiting = iter(specs)
    measurements: list[Measurement] = []

    async def client() -> None:
        for spec in waiting:
            measurement = await target.send(spec)
            measurements.append(measurement)
            done(measurement)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(specs))):
            group.create_task(client())
    return RunResult(measurements=measurements, seconds=time.perf_counter() - began)


async def at_arrival_times(target: Target, specs: Sequence[RequestSpec], done: Progress) -> RunResult:
    """Each request is sent at its own time, whatever became of the ones before (open loop)."""
    measurements: list[Measurement] = []
    began = time.perf_counter()

    async def one(spec: RequestSpec) -> None:
        await asyncio.sleep(max(0.0, began + spec.at - time.perf_counter()))
        measurement = await target.send(spec)
        measurements.append(measurement)
        done(measurement)

    async with asyncio.TaskGroup() as group:
        for spec in specs:
            group.create_task(one(spec))
    return RunResult(measurements=measurements, seconds=time.perf_counter() - began)


async def reference_texts(target: Target, specs: Sequence[RequestSpec], done: Progress) -> dict[Prompt, str]:
    """The text for each distinct prompt, asked one at a time. Raises `RemoteError` when one fails."""
    texts: dict[Prompt, str] = {}
    for spec in specs:
        if spec.prompt in texts:
            continue
        measurement = await target.send(spec)
        if measurement.error is not None:
            raise RemoteError(f"the reference run failed: {measurement.error}")
        texts[spec.prompt] = measurement.text
        done(measurement)
    return texts
