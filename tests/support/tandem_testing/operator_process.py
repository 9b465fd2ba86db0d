"""`tandem-operator` as a process, against the control plane of the tests."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tandem_testing.metric_text import metric_sum
from tandem_testing.waiting import wait_for

START_S = 60.0
END_S = 60.0


class OperatorProcess:
    """Make it with `operator`."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log_file = log
        self._http: httpx.Client | None = None

    def wait_until_up(self) -> None:
        """Until it has listed everything, leader or not."""
        wait_for(lambda: self._port() is not None, START_S, self.log)
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{self._port()}", timeout=END_S)
        wait_for(lambda: self.get("/readyz").status_code == 200, START_S, self.log)

    def get(self, path: str) -> httpx.Response:
        assert self._http is not None, "not up yet"
        return self._http.get(path)

    def metric(self, name: str) -> float:
        """Sum of a metric's series, with the labels that `name` gives if any."""
        return metric_sum(self.get("/metrics").text, name)

    @property
    def leading(self) -> bool:
        return self.metric("tandem_operator_leader") == 1

    def stop(self) -> int:
        """SIGTERM; its exit status."""
        self.process.terminate()
        return self.process.wait(END_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(END_S)

    def log(self) -> str:
        return self.log_file.read_text()

    def close(self) -> None:
        if self._http is not None:
            self._http.close()
        if self.process.poll() is None:
            self.kill()

    def _port(self) -> int | None:
        assert self.process.poll() is None, self.log()
        for line in self.log().splitlines():
            fields = json.loads(line) if line.startswith("{") else {}
            if "port" in fields:
                return int(fields["port"])
        return None


@contextmanager
def operator(kubeconfig: Path, log: Path, *flags: str) -> Iterator[OperatorProcess]:
    """A running one that knows the cluster. Canaries are off unless `flags` say otherwise: pods without containers
    do not answer (`kube_answering` does for them).
    """
    command = (sys.executable, "-m", "tandem_operator.cli", "--canary", "off", "--http-host", "127.0.0.1")
    environment = {**os.environ, "KUBECONFIG": str(kubeconfig), "PYTHONPATH": os.pathsep.join(sys.path)}
    with log.open("wb") as output:
        process = subprocess.Popen(
            (*command, "--http-port", "0", *flags), stdout=output, stderr=subprocess.STDOUT, env=environment
        )
    running = OperatorProcess(process, log)
    try:
        running.wait_until_up()
        yield running
    finally:
        running.close()
