"""Does the memory of a gateway grow while it serves? A real gateway with its router and Redis, before mock workers.

    python benchmarks/gateway_soak.py [--minutes 60] [--rate 20] [--workers 4] [--sample-s 10] [--most-mib-h 1]
                                      [--out r.json]

Clients send `--rate` chats a second for `--minutes`, whole and streamed ones in turn, and check every token. It
reads the resident memory of the gateway's process every `--sample-s` seconds. The figure is the slope of the
least-squares line through the samples of the last half. The exit status is 1 where the slope is above `--most-mib-h`
MiB an hour.

In the first half the gateway fills what is bounded: the records that `explain` answers from, caches and connections.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / part) for part in ("engine", "services", "lab", "tests/support", "benchmarks")]

import uvloop  # noqa: E402
from chat_load import Question, Timings, open_loop  # noqa: E402
from gateway_systems import Case, Running, tandem  # noqa: E402

MIB = 1 << 20
BATCH_S = 10.0
"""Requests are made for as long at once, so that the load generator holds no hour of them."""

Sample = tuple[float, float]
"""Seconds since the start, and MiB."""


def slope_per_hour(samples: Sequence[Sample]) -> float:
    """MiB an hour, by least squares; 0 for fewer than two samples."""
    if len(samples) < 2:
        return 0.0
    mean_at = sum(at for at, _ in samples) / len(samples)
    mean = sum(mib for _, mib in samples) / len(samples)
    spread = sum((at - mean_at) ** 2 for at, _ in samples)
    return 3600.0 * sum((at - mean_at) * (mib - mean) for at, mib in samples) / spread


def resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


async def sample(pid: int, every_s: float, samples: list[Sample]) -> None:
    began = time.monotonic()
    while True:
        samples.append((round(time.monotonic() - began, 1), round(resident_mib(pid), 3)))
        if len(samples) % 6 == 1:
            print(f"{samples[-1][0]:.0f} s: {samples[-1][1]:.1f} MiB", file=sys.stderr, flush=True)
        await asyncio.sleep(every_s)


async def load(running: Running, options: argparse.Namespace) -> int:
    """Returns how many were answered. Raises `AssertionError` for a wrong answer."""
    end, number = time.monotonic() + 60.0 * options.minutes, 0
    while time.monotonic() < end:
        count = max(1, round(options.rate * BATCH_S))
        questions = [
            Question.of(each, tokens=1 + each % 32, stream=each % 2 == 0, expected=running.expected)
            for each in range(number, number + count)
        ]
        timings: Timings = await open_loop(running.port, questions, rate=options.rate)
        assert len(timings.whole) == count, "every request is answered"
        number += count
    return number


async def soak(running: Running, options: argparse.Namespace) -> dict[str, object]:
    samples: list[Sample] = []
    sampling = asyncio.create_task(sample(running.pids[0], options.sample_s, samples))
    try:
        answered = await load(running, options)
    finally:
        sampling.cancel()
    last_half = samples[len(samples) // 2 :]
    return {
        "minutes": options.minutes,
        "answered": answered,
        "first_mib": samples[0][1],
        "last_mib": samples[-1][1],
        "slope_mib_h": round(slope_per_hour(last_half), 3),
        "samples": samples,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=20.0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--sample-s", type=float, default=10.0)
    parser.add_argument("--most-mib-h", type=float, default=1.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with ExitStack() as stack:
        case = Case(clients=1, requests=0, tokens=1, stream=False, step_s=0.005)
        figures = uvloop.run(soak(tandem(stack, case, options), options))
    text = json.dumps(figures, indent=2)
    if options.out is not None:
        options.out.write_text(text + "\n")
    print(json.dumps({name: value for name, value in figures.items() if name != "samples"}))
    if float(str(figures["slope_mib_h"])) > options.most_mib_h:
        sys.exit(1)


if __name__ == "__main__":
    main()
