"""What the console costs a gateway: the time and the bytes of one fleet document, which all viewers of a second share.

    PYTHONPATH=tests/support python benchmarks/console_cost.py

Every worker has links to eight others. No target, no peer: the figure to hold it against is the second that passes
between two documents.
"""

import json
from statistics import median
from time import perf_counter

from tandem_services.common.health import Health
from tandem_services.gateway.console.fleet_document import GatewayFigures, ViewedFleet, fleet_document
from tandem_services.gateway.http.sse import encode_json
from tandem_services.gateway.observe.explain import ChoiceRecord, RequestJournal, RequestRecord
from tandem_testing.console_builders import ScriptedFleet, link, member

REPEATS = 50
LINKS = 8
REQUESTS = 4096


def full_journal() -> RequestJournal:
    """As many finished requests as a gateway remembers."""
    journal = RequestJournal(REQUESTS)
    for number in range(REQUESTS):
        choice = ChoiceRecord(index=0, ttft_s=0.1, cached_tokens=64, output_tokens=100)
        journal.open(
            RequestRecord(
                request_id=str(number),
                client_request_id=None,
                endpoint="/v1/chat/completions",
                model="m",
                requested_model="m",
                stream=True,
                prompt_tokens=128,
                n=1,
                created=0,
                choices=[choice],
                status=200,
                e2e_s=2.0,
            )
        )
    return journal


def measure(workers: int, journal: RequestJournal) -> dict[str, float]:
    links = tuple(link(f"peer-{number}") for number in range(LINKS))
    fleet = ScriptedFleet(members=[member(f"worker-{number}", links=links) for number in range(workers)])
    fleets = [ViewedFleet("default", fleet)]
    figures = GatewayFigures(
        health=Health(),
        running=lambda: journal.running,
        waiting=lambda: 0,
        journal=journal,
        latency=tuple,
        uptime_s=lambda: 7.0,
        requires_key=False,
    )
    times, size = [], 0
    for _ in range(REPEATS):
        began = perf_counter()
        size = len(encode_json(fleet_document(fleets, figures)))
        times.append(perf_counter() - began)
    return {"workers": workers, "ms": round(median(times) * 1000, 3), "kib": round(size / 1024, 1)}


def main() -> None:
    journal = full_journal()
    print(json.dumps({"fleet_document": [measure(workers, journal) for workers in (4, 64, 256)]}, indent=2))


if __name__ == "__main__":
    main()
