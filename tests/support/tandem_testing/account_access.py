"""Access to a control plane as a service account: its token, as a pod of it would have."""

import json
import ssl

import httpx

from tandem_testing.control_plane import ControlPlane


def account_token(control_plane: ControlPlane, namespace: str, account: str) -> str:
    """A token, by the TokenRequest API."""
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"audiences": []}}
    token: str = control_plane.api.post(path, json=request).raise_for_status().json()["status"]["token"]
    return token


def account_client(control_plane: ControlPlane, namespace: str, account: str) -> httpx.Client:
    """Requests as the account. Close it."""
    cluster = json.loads(control_plane.kubeconfig.read_text())["clusters"][0]["cluster"]
    headers = {"Authorization": f"Bearer {account_token(control_plane, namespace, account)}"}
    tls = ssl.create_default_context(cafile=cluster["certificate-authority"])
    return httpx.Client(base_url=cluster["server"], verify=tls, headers=headers, timeout=60.0)
