"""How long the operator takes for many ModelServices, against a real API server with nodes that run no containers.

    python benchmarks/operator_scale.py [--services 200] [--canaries] [--workers 8] [--looks 200] [--out r.json]

Needs the control plane that `make test-kube` builds. It starts one of its own, and one operator, and measures:

    converge    from the first `kubectl apply` to the last service that is Ready; services are applied one after the
                other
    restart     a new operator, from its start to when it has looked at every service: what it writes then, and whether
                that changed any object
    unchanged   `--looks` looks at services of which nothing has changed but an annotation, one at a time: time of a
                look by the operator's own histogram, and what it wrote
    idle        what an operator costs while nothing happens, over ten seconds

No container runs in the pods. With --canaries this process answers for all of them over HTTP, and workers stand by
until a canary has passed; its own CPU is then part of what the machine has to do, and only `converge` is measured.
Without, canaries are switched off.

Pods, Deployments and their statuses are made by the controllers of Kubernetes on the same machine; of the time to
converge `operator_cpu_s` is the operator's own.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / part) for part in ("engine", "services", "operator", "lab", "tests/support")]

from tandem_testing.control_plane import NODES, TOOL, ControlPlane, client_of, install_crds  # noqa: E402
from tandem_testing.kube_answering import answering  # noqa: E402
from tandem_testing.kube_services import GROUP, Services  # noqa: E402
from tandem_testing.operator_process import OperatorProcess, operator  # noqa: E402
from tandem_testing.waiting import wait_for  # noqa: E402

NAMESPACE = "scale"
PATIENCE_S = 900.0
QUIET_S = 2.0
WRITES = "tandem_operator_api_writes_total"
UNCHANGED = 'tandem_operator_reconciles_total{result="unchanged"}'
LOOK_S = "tandem_operator_reconcile_seconds"


@contextmanager
def started(folder: Path) -> Iterator[ControlPlane]:
    command = (sys.executable, str(TOOL), "hold", "--run", str(folder / "run"), "--fake-nodes", str(NODES))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        info = json.loads(process.stdout.readline())
        kubeconfig = Path(info["kubeconfig"])
        with client_of(kubeconfig) as api:
            cluster = ControlPlane(kubeconfig=kubeconfig, version=info["version"], api=api)
            install_crds(cluster)
            api.post("/api/v1/namespaces", json={"metadata": {"name": NAMESPACE}}).raise_for_status()
            account = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/default"
            wait_for(lambda: api.get(account).status_code == 200, 60.0)
            yield cluster


def cpu_s(process: OperatorProcess) -> float:
    """CPU seconds that it has used so far."""
    fields = Path(f"/proc/{process.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mib(process: OperatorProcess) -> float:
    """Resident memory."""
    pages = int(Path(f"/proc/{process.process.pid}/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)


def listed(services: Services) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = services.cluster.get(f"{GROUP}/namespaces/{NAMESPACE}/modelservices")["items"]
    return items


def is_ready(body: dict[str, Any]) -> bool:
    conditions = body.get("status", {}).get("conditions", [])
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def converge(services: Services, running: OperatorProcess, count: int, spec: dict[str, Any]) -> dict[str, Any]:
    begin, cpu = time.monotonic(), cpu_s(running)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda number: services.apply(f"s{number}", **spec), range(count)))
    applied = time.monotonic() - begin
    while sum(map(is_ready, listed(services))) < count:
        assert time.monotonic() - begin < PATIENCE_S, running.log()[-2000:]
        time.sleep(0.5)
    return {
        "seconds": round(time.monotonic() - begin, 1),
        "applied_s": round(applied, 1),
        "operator_cpu_s": round(cpu_s(running) - cpu, 1),
        "writes": running.metric(WRITES),
        "failed_looks": running.metric('tandem_operator_reconciles_total{result="failed"}'),
        "memory_mib": memory_mib(running),
    }


def restart(services: Services, running: OperatorProcess, begin: float, versions: set[str]) -> dict[str, Any]:
    wait_for(lambda: running.metric("tandem_operator_services") == len(versions), PATIENCE_S, running.log)
    quiet(running)
    now = listed(services)
    return {
        "seconds": round(time.monotonic() - begin - QUIET_S, 1),
        "writes": running.metric(WRITES),
        "services_changed": len(versions_of(now) ^ versions) // 2,
        "ready": sum(map(is_ready, now)),
    }


def versions_of(bodies: list[dict[str, Any]]) -> set[str]:
    return {f"{one['metadata']['name']} {one['metadata']['resourceVersion']}" for one in bodies}


def unchanged(services: Services, running: OperatorProcess, looks: int, count: int) -> dict[str, Any]:
    quiet(running)
    seen, writes = running.metric(UNCHANGED), running.metric(WRITES)
    seconds, number = running.metric(f"{LOOK_S}_sum"), running.metric(f"{LOOK_S}_count")
    for index in range(looks):
        note = {"metadata": {"annotations": {"seen": str(index)}}}
        services.cluster.merge(services.path(f"s{index % count}"), note).raise_for_status()
        wait_for(lambda least=seen + index + 1: running.metric(UNCHANGED) >= least, 60.0, running.log)
    looked = running.metric(f"{LOOK_S}_count") - number
    took = running.metric(f"{LOOK_S}_sum") - seconds
    return {
        "looks": looked,
        "mean_ms": round(took / looked * 1000, 2),
        "writes": running.metric(WRITES) - writes,
    }


def quiet(running: OperatorProcess) -> None:
    """Until two seconds pass without a look."""
    before = -1.0
    while (now := running.metric(f"{LOOK_S}_count")) != before or running.metric("tandem_operator_queue_length"):
        before = now
        time.sleep(QUIET_S)


def idle(running: OperatorProcess) -> dict[str, Any]:
    cpu, writes = cpu_s(running), running.metric(WRITES)
    time.sleep(10.0)
    return {"cpu_share": round((cpu_s(running) - cpu) / 10.0, 3), "writes": running.metric(WRITES) - writes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--services", type=int, default=200)
    parser.add_argument("--canaries", action="store_true", help="pods answer, and canaries go through them")
    parser.add_argument("--workers", default="8", help="services that the operator looks at at the same time")
    parser.add_argument("--looks", type=int, default=200)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    flags = ("--no-leader-elect", "--workers", options.workers)
    with tempfile.TemporaryDirectory() as name, started(Path(name)) as cluster:
        folder, services = Path(name), Services(cluster, NAMESPACE)
        place = (cluster.kubeconfig, folder / "first.log")
        result: dict[str, Any] = {"kubernetes": cluster.version, "services": options.services}
        if options.canaries:
            with answering(services, poll_s=3.0) as pods, operator(*place, *flags, "--canary", "on") as running:
                result["converge"] = converge(services, running, options.services, pods.spec())
            report(result, options.out)
            return
        with operator(*place, *flags) as running:
            result["converge"] = converge(services, running, options.services, {})
        versions, begin = versions_of(listed(services)), time.monotonic()
        with operator(cluster.kubeconfig, folder / "second.log", *flags) as running:
            result["restart"] = restart(services, running, begin, versions)
            result["unchanged"] = unchanged(services, running, options.looks, options.services)
            result["idle"] = idle(running)
    report(result, options.out)


def report(result: dict[str, Any], out: Path | None) -> None:
    text = json.dumps(result, indent=1)
    print(text)
    if out is not None:
        out.write_text(text + "\n")


if __name__ == "__main__":
    main()
