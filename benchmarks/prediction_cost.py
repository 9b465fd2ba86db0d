"""What predicted latencies cost: a router's decision with and without them, and what they add to a request.

    python benchmarks/prediction_cost.py [--workers 8] [--tokens 1024] [--calls 60] [--rounds 80] [--out r.json]

Starts its own redis-server. Rounds with and without alternate, so that both see the machine of the moment; all figures
are CPU time of this process, medians over rounds, and ratios are medians of the ratios of neighboring rounds.

    decision    a decision of the router and its release, by Redis: `ratio` is with over without, at most 1.05
    request     what predicting, the header and learning add to a request in a gateway: microseconds, at so many
                requests a second that `LEARNED_PER_SECOND` of them are learned from
"""

import argparse
import asyncio
import json
import os
import random
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / part) for part in ("engine", "services", "lab", "tests/support", "benchmarks")]

from router_redis import MODEL, record  # noqa: E402

from tandem_engine.base.clock import MonotonicClock  # noqa: E402
from tandem_engine.messages.stats import StepFit  # noqa: E402
from tandem_services.common.metrics import MetricFamilies, new_registry  # noqa: E402
from tandem_services.gateway.observe.explain import ChoiceRecord, RequestRecord  # noqa: E402
from tandem_services.gateway.observe.predictions import Predictions, header_of  # noqa: E402
from tandem_services.router import selection  # noqa: E402
from tandem_services.router.decision import RouteDecision, RouteQuery  # noqa: E402
from tandem_services.router.router import Router  # noqa: E402
from tandem_testing.redis_server import RedisServer  # noqa: E402
from tandem_testing.router_builders import Fleet, patient_router  # noqa: E402

FIT = StepFit(base_s=0.004, sequence_s=2e-4, kv_token_s=1e-7, chunk_token_s=5e-5)

REQUESTS = 1000
"""Of the same second."""


def unpredicted(*_: object, **__: object) -> None:
    """In place of `predicted_latency`."""


async def decisions(router: Router, tokens: int, calls: int) -> float:
    """CPU seconds of each."""
    began = time.process_time()
    for _ in range(calls):
        ids = tuple(random.randrange(1000) for _ in range(8)) * (tokens // 8)
        query = RouteQuery(request_id="r", model=MODEL, token_ids=ids, max_tokens=256)
        await router.release(await router.choose(query))
    return (time.process_time() - began) / calls


def requests(choice: RouteDecision, calls: int) -> float:
    """CPU seconds of predicting, writing and learning, for each request."""
    known = Predictions(MetricFamilies(new_registry()), model=MODEL, clock=MonotonicClock())
    began = time.process_time()
    for _ in range(calls):
        attempts = ChoiceRecord(index=0, ttft_s=0.2, queue_s=0.1, admission_s=0.0, prefill_s=0.09, itl_s=0.01)
        predicted = known.predict(choice, gateway_wait_s=0.0)
        attempts.begin_attempt(choice, predicted=predicted, resumed_tokens=0, began_s=0.0).outcome = "finished"
        attempts.finish_reason = "length"
        done = RequestRecord(
            request_id="r",
            client_request_id=None,
            endpoint="",
            model=MODEL,
            requested_model=MODEL,
            stream=True,
            prompt_tokens=1,
            n=1,
            created=0,
            choices=[attempts],
            status=200,
        )
        header_of(done)
        known.finished(done)
    return (time.process_time() - began) / calls


async def measure(server: RedisServer, args: argparse.Namespace) -> dict[str, object]:
    async with Fleet.of(server, LEASE_MS=3_600_000) as fleet:
        router = patient_router(server)
        await router.start()
        try:
            for number in range(args.workers):
                each = record(number, args.workers)
                await fleet.beat(replace(each, load=replace(each.load, step_base_s=0.003, step_fit=FIT)))
            await router.refresh()
            with_s, without_s = [], []
            await decisions(router, args.tokens, args.calls)
            for number in range(args.rounds):
                for predicts in ((True, False), (False, True))[number % 2]:
                    with nullcontext() if predicts else patch.object(selection, "predicted_latency", unpredicted):
                        spent = await decisions(router, args.tokens, args.calls)
                    (with_s if predicts else without_s).append(spent)
            query = RouteQuery(request_id="r", model=MODEL, token_ids=(1,) * args.tokens, max_tokens=256)
            choice = await router.choose(query)
            assert choice.latency is not None, "nothing was predicted"
            unscored = replace(choice, latency=None)
            added_s = median(requests(choice, REQUESTS) - requests(unscored, REQUESTS) for _ in range(args.rounds))
        finally:
            await router.stop()
    return {
        "cpus": os.cpu_count(),
        "workers": args.workers,
        "prompt_tokens": args.tokens,
        "decision": {
            "with_us": round(1e6 * median(with_s), 1),
            "without_us": round(1e6 * median(without_s), 1),
            "ratio": round(median(one / other for one, other in zip(with_s, without_s, strict=True)), 4),
        },
        "request_us": round(1e6 * added_s, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=8, help="of the fleet (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=1024, help="of each prompt (default: %(default)s)")
    parser.add_argument("--calls", type=int, default=60, help="of each round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=80, help="with and without (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="file for the result")
    args = parser.parse_args()
    random.seed(1)
    server = RedisServer.start()
    try:
        text = json.dumps(asyncio.run(measure(server, args)), indent=1)
    finally:
        server.stop()
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
