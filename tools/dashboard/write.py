"""Write the Grafana dashboard of a Tandem deployment.

    python tools/dashboard/write.py [PATH]     writes charts/tandem/dashboards/tandem.json

The metrics that it names are those of `GET /metrics` of gateways and workers; tests/charts checks that each of
them exists with its labels, and that the committed file is what this writes.
"""

import argparse
from pathlib import Path

from grafana import Choice, dashboard
from kv_rows import CACHE, TRANSFER
from serving_rows import QUEUE, ROUTING, SERVICE
from worker_rows import FAILURES, WORKER

TARGET = Path(__file__).resolve().parents[2] / "charts" / "tandem" / "dashboards" / "tandem.json"
ROWS = (SERVICE, QUEUE, ROUTING, CACHE, TRANSFER, WORKER, FAILURES)


def document() -> str:
    """The file's text."""
    return dashboard(
        uid="tandem",
        title="Tandem",
        description="Gateways and workers of Tandem deployments. Written by tools/dashboard/write.py.",
        choices=(
            Choice("gateway", "Gateway", "tandem_gateway_num_requests_running", "instance"),
            Choice("worker", "Worker", "tandem_worker_registered", "instance"),
        ),
        rows=ROWS,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", type=Path, default=TARGET)
    target = parser.parse_args().target
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(document(), "utf-8")
    print(target)


if __name__ == "__main__":
    main()
