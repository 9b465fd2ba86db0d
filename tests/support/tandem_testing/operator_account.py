"""The operator's own ServiceAccount with the rights of charts/install.yaml, for operators that tests start.

    operators' namespace   the account, once per session
    namespace of a test    the rights of the chart as a Role, as its default scope gives them, and those of its lease

An operator that authenticates as this account finds what the chart forgets to grant: an administrator's does not.
"""

import json
from pathlib import Path
from typing import Any

import httpx
import yaml

from tandem_testing.account_access import account_client, account_token
from tandem_testing.control_plane import PATIENCE_S, ControlPlane, Manifest
from tandem_testing.waiting import wait_for

INSTALL = Path(__file__).parents[3] / "charts/install.yaml"
RBAC = "rbac.authorization.k8s.io/v1"


class OperatorAccount:
    """Makes the account in `home`, which has to exist."""

    def __init__(self, cluster: ControlPlane, home: str) -> None:
        self._cluster = cluster
        self.home = home
        self._manifests = list(yaml.safe_load_all(INSTALL.read_text()))
        account = self._installed("ServiceAccount")
        self.name: str = account["metadata"]["name"]
        cluster.apply(_moved(account, home)).raise_for_status()

    def rules(self) -> list[dict[str, Any]]:
        """What the chart grants in each namespace that the operator serves."""
        granted: list[dict[str, Any]] = self._installed("ClusterRole", "-operator")["rules"]
        return granted

    def admit(self, namespace: str, rules: list[dict[str, Any]] | None = None) -> None:
        """Grant `rules` in a namespace, without which what the chart grants there; and its lease in the same one."""
        rights, leader = self._installed("ClusterRole", "-operator"), self._installed("Role", "-leader")
        self._bind(namespace, rights["metadata"]["name"], self.rules() if rules is None else rules)
        self._bind(namespace, leader["metadata"]["name"], leader["rules"])
        with self.client() as client:
            # Authorizers follow changes of roles with a delay.
            wait_for(lambda: _may_list(client, namespace), PATIENCE_S, lambda: f"no rights in {namespace}")

    def admit_everywhere(self) -> None:
        """Grant what charts/install.yaml grants in the whole cluster."""
        role = self._installed("ClusterRole", "-operator")
        self._cluster.apply(role).raise_for_status()
        binding = self._installed("ClusterRoleBinding", "-operator")
        self._cluster.apply({**binding, "subjects": [self._subject()]}).raise_for_status()

    def dismiss(self, namespace: str) -> None:
        """Take the rights in a namespace away, as the deletion of the namespace or of the chart's release does."""
        for kind in ("RoleBinding", "Role"):
            for name in (self._installed(one, end)["metadata"]["name"] for one, end in _ROLES):
                manifest = {"apiVersion": RBAC, "kind": kind, "metadata": {"name": name, "namespace": namespace}}
                self._cluster.api.delete(self._cluster.path(manifest)).raise_for_status()

    def kubeconfig(self, path: Path) -> Path:
        """Written to `path`, with a token of the account."""
        config = json.loads(self._cluster.kubeconfig.read_text())
        config["users"][0]["user"] = {"token": account_token(self._cluster, self.home, self.name)}
        path.touch(mode=0o600)
        path.write_text(json.dumps(config))
        return path

    def client(self) -> httpx.Client:
        """Requests as the account. Close it."""
        return account_client(self._cluster, self.home, self.name)

    def _bind(self, namespace: str, name: str, rules: list[dict[str, Any]]) -> None:
        metadata = {"name": name, "namespace": namespace}
        role = {"apiVersion": RBAC, "kind": "Role", "metadata": metadata, "rules": rules}
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
        binding = {"apiVersion": RBAC, "kind": "RoleBinding", "metadata": metadata, "roleRef": reference}
        for manifest in (role, {**binding, "subjects": [self._subject()]}):
            self._cluster.apply(manifest).raise_for_status()

    def _subject(self) -> Manifest:
        return {"kind": "ServiceAccount", "name": self.name, "namespace": self.home}

    def _installed(self, kind: str, end: str = "") -> Manifest:
        found = [one for one in self._manifests if one["kind"] == kind and one["metadata"]["name"].endswith(end)]
        assert len(found) == 1, f"charts/install.yaml has {len(found)} of kind {kind} named *{end}"
        return dict(found[0])


_ROLES = (("ClusterRole", "-operator"), ("Role", "-leader"))


def _moved(manifest: Manifest, namespace: str) -> Manifest:
    return {**manifest, "metadata": {**manifest["metadata"], "namespace": namespace}}


def _may_list(client: httpx.Client, namespace: str) -> bool:
    return client.get(f"/apis/tandem.dev/v1beta1/namespaces/{namespace}/modelservices").status_code == 200
