"""Programs of other projects that `make test-neighbours` runs beside ours: Prometheus, and a registry of OCI artefacts.

Debian has both; tools/neighbours/setup.sh unpacks them.
"""

import json
import os
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem_services.common.sockets import free_port
from tandem_testing.waiting import wait_for

HOME = Path(os.environ.get("TANDEM_NEIGHBOURS_HOME", "~/.cache/tandem-neighbours")).expanduser()
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
NOT_RUN = "NEIGHBOURS WERE NOT RUN"

NEEDS_NEIGHBOURS = [
    pytest.mark.skipif(
        "TANDEM_NEIGHBOURS" not in os.environ, reason=f"{NOT_RUN}: `make test-neighbours` runs these tests"
    ),
    pytest.mark.slow,
    pytest.mark.xdist_group("neighbours"),
]
"""Marks of every file of tests that needs them."""


@contextmanager
def program(name: str, *arguments: str, client: httpx.Client, path: str, log: Path) -> Iterator[None]:
    """One that runs while the block does, which begins once `path` is answered with a status below 500."""
    binary = HOME / "bin" / name
    assert binary.exists(), f"{binary} is missing: tools/neighbours/setup.sh unpacks it"
    with log.open("wb") as output:
        process = subprocess.Popen([str(binary), *arguments], stdout=output, stderr=subprocess.STDOUT)

    def answers() -> bool:
        assert process.poll() is None, f"{name} ended with {process.returncode}: {log.read_text(errors='replace')}"
        try:
            return client.get(path).status_code < 500
        except httpx.TransportError:
            return False

    try:
        wait_for(answers, START_TIMEOUT_S, lambda: log.read_text(errors="replace")[-2000:])
        yield
    finally:
        process.terminate()
        process.wait(STOP_TIMEOUT_S)


@dataclass(frozen=True, kw_only=True)
class Registry:
    """An OCI registry with TLS on loopback, without accounts."""

    host: str
    authority: Path
    """Certificate of its CA."""
    api: httpx.Client


@contextmanager
def registry(folder: Path) -> Iterator[Registry]:
    """One with its files in `folder`."""
    port = free_port("127.0.0.1")
    certificate, key = folder / "registry.crt", folder / "registry.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "30", "-subj", "/CN=registry", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-out", certificate, "-keyout", key], check=True, capture_output=True)
    config = folder / "registry.json"
    http = {"addr": f"127.0.0.1:{port}", "tls": {"certificate": str(certificate), "key": str(key)}}
    storage = {"filesystem": {"rootdirectory": str(folder / "registry")}}
    config.write_text(json.dumps({"version": 0.1, "storage": storage, "http": http}))
    verified = ssl.create_default_context(cafile=str(certificate))
    with (
        httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=verified) as client,
        program("docker-registry", "serve", str(config), client=client, path="/v2/", log=folder / "registry.log"),
    ):
        yield Registry(host=f"127.0.0.1:{port}", authority=certificate, api=client)


@contextmanager
def prometheus(folder: Path, config: dict[str, Any]) -> Iterator[httpx.Client]:
    """A Prometheus with this configuration; gives a client of its API."""
    port = free_port("127.0.0.1")
    file = folder / "prometheus.yaml"
    file.write_text(json.dumps(config))
    arguments = [
        f"--config.file={file}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (
        httpx.Client(base_url=f"http://127.0.0.1:{port}") as client,
        program("prometheus", *arguments, client=client, path="/-/ready", log=folder / "prometheus.log"),
    ):
        yield client
