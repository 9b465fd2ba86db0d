"""A real Kubernetes control plane for tests: API server, controllers, CRD engine and nodes without containers.

    first test that asks ─▶ `control_plane.py hold` ─▶ our CRDs ─▶ tests, each in a namespace of its own
                                                    ─▶ the pipe to its standard input closes ─▶ everything ends

The binaries are built by `make test-kube`. Where they are not, tests skip, all with one line of the report.
"""

import json
import logging
import os
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tandem_testing.api_schemas import neighbour_definitions
from tandem_testing.waiting import wait_equal

Manifest = dict[str, Any]

log = logging.getLogger(__name__)

ROOT = Path(__file__).parents[3]
TOOL = ROOT / "tools/kube/control_plane.py"
CRD_FILE = ROOT / "charts/tandem/crds/tandem.dev.yaml"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
HOME = Path(os.environ.get("TANDEM_KUBE_HOME") or Path.home() / ".cache/tandem-kube")
BINARIES = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl", "crdserver")
REQUIRED = "TANDEM_KUBE_REQUIRED"
"""Set by `make test-kube`: then missing binaries are an error and no reason to skip."""
NOT_RUN = "NO TEST AGAINST KUBERNETES WAS RUN"
APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
TABLE = "application/json;as=Table;g=meta.k8s.io;v=v1"
PATIENCE_S = 60.0
ABOUT = pytest.StashKey[str]()
"""What the tests ran against, for the report: a pass on an old interface is none on a new one."""
NODES = 3

KUBE = [pytest.mark.kube, pytest.mark.slow, pytest.mark.xdist_group("kube")]
"""Marks of every file of tests that needs the cluster: one worker runs them all, so that one cluster is started."""


@dataclass(frozen=True, kw_only=True)
class ControlPlane:
    """A running one."""

    kubeconfig: Path
    """Of an administrator; `kubernetes.config.load_kube_config` and kubectl read it."""
    version: str
    api: httpx.Client
    """Requests by path, with the administrator's token."""

    def serves(self, group_version: str) -> bool:
        """Whether discovery knows it, e.g. `policy/v1`."""
        return self.api.get(f"/apis/{group_version}").status_code == 200

    def newest(self, *group_versions: str) -> str:
        """The first of them that discovery knows."""
        return next(one for one in group_versions if self.serves(one))

    def collection(self, manifest: Manifest) -> str:
        """Path of all objects of a manifest's kind in its namespace."""
        group = manifest["apiVersion"]
        root = f"/apis/{group}" if "/" in group else f"/api/{group}"
        resources = self.get(root)["resources"]
        found = [one for one in resources if one["kind"] == manifest["kind"] and "/" not in one["name"]]
        assert found, f"{group} has no kind {manifest['kind']}"
        namespace = f"/namespaces/{manifest['metadata']['namespace']}" if found[0]["namespaced"] else ""
        return f"{root}{namespace}/{found[0]['name']}"

    def path(self, manifest: Manifest, subresource: str = "") -> str:
        """Of the object that a manifest describes."""
        end = f"/{subresource}" if subresource else ""
        return f"{self.collection(manifest)}/{manifest['metadata']['name']}{end}"

    def apply(self, manifest: Manifest, *, manager: str = "test", force: bool = False, **query: str) -> httpx.Response:
        """Server-side apply; the answer may be a refusal."""
        params = {"fieldManager": manager, "force": str(force).lower(), **query}
        headers = {"Content-Type": APPLY}
        return self.api.patch(self.path(manifest), content=json.dumps(manifest), headers=headers, params=params)

    def merge(self, path: str, patch: Manifest) -> httpx.Response:
        """JSON merge patch."""
        return self.api.patch(path, content=json.dumps(patch), headers={"Content-Type": MERGE})

    def get(self, path: str) -> Any:
        """The object or list at `path`."""
        return self.api.get(path).raise_for_status().json()

    def kubectl(self, *words: str) -> str:
        """What `kubectl` of the control plane's release prints. Raises `AssertionError` with its errors."""
        command = (str(HOME / "bin/kubectl"), "--kubeconfig", str(self.kubeconfig), *words)
        # Discovery is cached below the home directory, and each cluster would find another's.
        environment = {**os.environ, "HOME": str(self.kubeconfig.parent)}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, f"kubectl {' '.join(words)}: {done.stderr}"
        return done.stdout


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[ControlPlane]:
    """One for all tests of the session, with the CRDs of the chart."""
    missing = [name for name in BINARIES if not (HOME / "bin" / name).exists()]
    if missing:
        text = f"{', '.join(missing)} not in {HOME / 'bin'}; `make test-kube` builds what is missing"
        (pytest.fail if os.environ.get(REQUIRED) else pytest.skip)(f"{NOT_RUN}: {text}")
    directory = tmp_path_factory.mktemp("control-plane")
    with subprocess.Popen(
        (sys.executable, str(TOOL), "hold", "--run", str(directory / "run"), "--scheduler", "--fake-nodes", str(NODES)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for pytest, which then closes the pipe
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "the control plane did not start: see above"
        info = json.loads(line)
        with client_of(Path(info["kubeconfig"])) as api:
            cluster = ControlPlane(kubeconfig=Path(info["kubeconfig"]), version=info["version"], api=api)
            install_crds(cluster)
            request.config.stash[ABOUT] = _about(cluster, info["seconds"])
            yield cluster
        # Leaving the block closes standard input, and waits.


@pytest.fixture
def namespace(control_plane: ControlPlane) -> Iterator[str]:
    """A namespace of the test's own, in which pods can be made; it goes away afterwards, in the background."""
    made = control_plane.api.post("/api/v1/namespaces", json={"metadata": {"generateName": "test-"}})
    name: str = made.raise_for_status().json()["metadata"]["name"]
    # Without the default service account no pod is admitted.
    account = f"/api/v1/namespaces/{name}/serviceaccounts/default"
    wait_equal(lambda: control_plane.api.get(account).status_code, 200, PATIENCE_S, lambda: account)
    yield name
    gone = control_plane.api.delete(f"/api/v1/namespaces/{name}")
    # A test may have deleted it itself.
    assert gone.status_code in (200, 404), gone.text


def install_crds(cluster: ControlPlane) -> None:
    """Apply those of the chart and wait until they are served."""
    for crd in yaml.safe_load_all(CRD_FILE.read_text()):
        cluster.apply(crd).raise_for_status()
        spec = crd["spec"]
        path = f"/apis/{spec['group']}/{spec['versions'][0]['name']}/{spec['names']['plural']}"
        wait_equal(lambda path=path: cluster.api.get(path).status_code, 200, PATIENCE_S, lambda path=path: path)


@contextmanager
def neighbour_apis(cluster: ControlPlane, *kinds: str) -> Iterator[None]:
    """APIs of tools/neighbours/crds, there within the block: other tests are about clusters without them."""
    found = [one for one in neighbour_definitions() if one["spec"]["names"]["kind"] in kinds]
    assert len(found) == len(kinds), kinds
    paths = [f"/apis/{one['spec']['group']}/v1/{one['spec']['names']['plural']}" for one in found]
    for one in found:
        cluster.apply(one).raise_for_status()
    for path in paths:
        wait_equal(lambda path=path: cluster.api.get(path).status_code, 200, PATIENCE_S, lambda path=path: path)
    yield
    for one in found:
        cluster.api.delete(f"{CRDS}/{one['metadata']['name']}").raise_for_status()
    for path in paths:
        wait_equal(lambda path=path: cluster.api.get(path).status_code, 404, PATIENCE_S, lambda path=path: path)


def _about(cluster: ControlPlane, seconds: float) -> str:
    budgets = cluster.newest("policy/v1", "policy/v1beta1")
    scalers = cluster.newest("autoscaling/v2", "autoscaling/v2beta2")
    return f"Kubernetes {cluster.version}, up within {seconds:g} s; {budgets}, {scalers}"


def client_of(kubeconfig: Path) -> httpx.Client:
    """Requests with the credentials of that file, as the control plane writes them. Close it."""
    config = json.loads(kubeconfig.read_text())
    cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
    tls = ssl.create_default_context(cafile=cluster["certificate-authority"])
    headers = {"Authorization": f"Bearer {user['token']}"}
    hooks = {"response": [_log_refusal]}
    return httpx.Client(base_url=cluster["server"], verify=tls, headers=headers, timeout=PATIENCE_S, event_hooks=hooks)


def _log_refusal(response: httpx.Response) -> None:
    """Why a request was refused stands in its body; pytest shows logs of tests that fail."""
    if response.is_error and response.request.method != "GET":  # those are what tests wait with
        text = response.read().decode(errors="replace")
        log.warning("%s %s: %d %s", response.request.method, response.request.url, response.status_code, text)
