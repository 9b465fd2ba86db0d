"""Predicted against measured latency of a real fleet, at several loads.

    python benchmarks/latency_prediction.py [--rates 1,2,3,5] [--seconds 30] [--warm-up 45] [--prefill 2] [--decode 2]
                                            [--out r.json]

`tandem up` serves the bundled model with real workers and Redis. Streams with prompts of 20 to 800 words and 8 to 64
output tokens start at their times (open loop), `--rates` a second, one rate after the other. The warm-up runs at the
middle rate: the workers leave the first 30 s out of their fit, and the gateway has nothing to learn from before.

Per rate, of the requests that the gateway has predicted, by their records (`explain`)

    ttft, itl    median and central 80 % of measured / predicted; the median should be 0.8 to 1.25
    kept         share of the requests that took no longer than the prediction times its margin, which is that of the
                 95th percentile
    header       share of the responses that had `x-tandem-predicted-ttft-ms`

`factors` are what the gateway has learned at the end, by kind and placement. `accepted` has what of this is as it
should be: the medians of `ttft`, and `kept` of all rates together; the exit status is 1 if one is not.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / part) for part in ("engine", "services", "lab", "tests/support", "benchmarks")]

import httpx  # noqa: E402

from tandem_testing.system import System  # noqa: E402

HEADER = "x-tandem-predicted-ttft-ms"
LEAST, MOST = 0.8, 1.25
"""Of the median of measured / predicted time to the first token."""
PERCENTILE = 0.95
"""`--slo-percentile` of the gateway: the share of requests that margins are for."""
WORDS = "river fox boat stone bridge apple morning winter village baker garden island".split()


@dataclass(frozen=True, slots=True)
class Answered:
    """One stream that has ended."""

    answer_id: str
    predicted_ms: int | None
    """Of the header."""


async def stream(client: httpx.AsyncClient, random: Random) -> Answered:
    """One request, different from all others. Raises for any status but 200."""
    prompt = " ".join(random.choice(WORDS) for _ in range(random.randint(20, 800)))
    body = {
        "model": "tandem-mini",
        "prompt": prompt,
        "max_tokens": random.randint(8, 64),
        "stream": True,
        "ignore_eos": True,
    }
    answer_id = ""
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                answer_id = json.loads(line[6:])["id"]
    header = response.headers.get(HEADER)
    return Answered(answer_id, None if header is None else int(header))


async def load(client: httpx.AsyncClient, rate: float, seconds: float, random: Random) -> list[Answered]:
    """Requests start at random times, regardless of earlier ones."""
    tasks, until = [], time.perf_counter() + seconds
    while time.perf_counter() < until:
        tasks.append(asyncio.create_task(stream(client, random)))
        await asyncio.sleep(random.expovariate(rate))
    return list(await asyncio.gather(*tasks))


async def choice_of(client: httpx.AsyncClient, answered: Answered) -> dict[str, Any]:
    response = await client.get(f"/v1/requests/{answered.answer_id}/explain")
    response.raise_for_status()
    [choice] = response.json()["choices"]
    return choice


def spread(ratios: Sequence[float]) -> dict[str, float]:
    ordered = sorted(ratios)

    def rank(share: float) -> float:
        return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3)

    return {"median": rank(0.5), "p10": rank(0.1), "p90": rank(0.9)} if ordered else {}


async def measured(client: httpx.AsyncClient, answers: Sequence[Answered]) -> dict[str, Any]:
    choices = [await choice_of(client, each) for each in answers]
    pairs = [(choice, choice["attempts"][0]["predicted"]) for choice in choices if len(choice["attempts"]) == 1]
    pairs = [(choice, predicted) for choice, predicted in pairs if predicted is not None]
    with_itl = [(c, p) for c, p in pairs if c["itl_s"] is not None and p["itl_s"] is not None]
    return {
        "requests": len(answers),
        "predicted": len(pairs),
        "header": sum(each.predicted_ms is not None for each in answers) / len(answers),
        "ttft_s": spread([choice["ttft_s"] for choice, _ in pairs]),
        "ttft": spread([choice["ttft_s"] / predicted["ttft_s"] for choice, predicted in pairs]),
        "itl": spread([choice["itl_s"] / predicted["itl_s"] for choice, predicted in with_itl]),
        "kept": round(
            sum(c["ttft_s"] <= p["ttft_s"] * p["margin"] for c, p in pairs) / max(1, len(pairs)),
            3,
        ),
    }


async def factors(client: httpx.AsyncClient) -> Any:
    response = await client.get("/console/data/fleet")
    response.raise_for_status()
    return response.json()["latency"]


def accepted(loads: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Of all rates, and what decides: `kept` is a share of all requests, because margins learn from all of them."""
    medians = {rate: one["ttft"].get("median", 0.0) for rate, one in loads.items()}
    predicted = sum(one["predicted"] for one in loads.values())
    kept = sum(one["kept"] * one["predicted"] for one in loads.values()) / max(1, predicted)
    return {
        "ttft medians": all(LEAST <= median <= MOST for median in medians.values()),
        "kept": kept >= PERCENTILE,
        "figures": {"ttft medians": medians, "kept": round(kept, 3), "requests": predicted},
    }


async def run(url: str, rates: Sequence[float], args: argparse.Namespace) -> dict[str, Any]:
    random = Random(args.seed)
    async with httpx.AsyncClient(base_url=url, timeout=120.0) as client:
        await load(client, rates[len(rates) // 2], args.warm_up, random)
        loads = {}
        for rate in rates:
            answers = await load(client, rate, args.seconds, random)
            loads[f"{rate:g}"] = await measured(client, answers)
        return {"loads": loads, "factors": await factors(client), "accepted": accepted(loads)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="1,2,3,5", help="requests per second (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each rate (default: %(default)s)")
    parser.add_argument("--warm-up", type=float, default=45.0, help="seconds before the first (default: %(default)s)")
    parser.add_argument("--prefill", type=int, default=2, help="prefill workers (default: %(default)s)")
    parser.add_argument("--decode", type=int, default=2, help="decode workers (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="file for the result")
    args = parser.parse_args()
    rates = [float(rate) for rate in args.rates.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        system = System.start(Path(folder), "--prefill", str(args.prefill), "--decode", str(args.decode))
        try:
            result = asyncio.run(run(system.url, rates, args))
        finally:
            system.close()
    text = json.dumps(result, indent=2)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n")
    if not (result["accepted"]["ttft medians"] and result["accepted"]["kept"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
