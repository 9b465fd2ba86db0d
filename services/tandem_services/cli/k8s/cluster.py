"""The API server, as kubectl would reach it: kubeconfig, context, namespace, credentials and their renewal.

The official client reads all of that. Requests are plain JSON over httpx, since ModelServices have no classes in the
client, and what goes wrong becomes one sentence that says what to do.
"""

import argparse
import json
import ssl
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx

from tandem_engine.errors import ConfigError
from tandem_engine.logs import quoted
from tandem_operator.api.model_service import GROUP, VERSION
from tandem_services.common.errors import ServiceError

Object = dict[str, Any]

API = f"apis/{GROUP}/{VERSION}"
SERVICES = "modelservices"
POOLS = "workerpools"
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
MERGE = "application/merge-patch+json"
TIMEOUT = httpx.Timeout(30.0, connect=5.0)
PAGE = 500
MAX_OBJECTS = 20_000
"""Of one list: more than a namespace has."""


class ClusterError(ServiceError):
    """The API server does not do what was asked. The message says what to do."""

    code = "cluster_error"

    def __init__(self, message: str, *, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """How to reach a cluster."""

    host: str
    """URL of the API server."""
    namespace: str
    tls: ssl.SSLContext | None
    server_name: str | None
    """What its certificate is for, where that is not the host."""
    proxy: str | None
    credentials: Any
    """The client's `Configuration`, which renews tokens when they are asked for."""

    def headers(self) -> dict[str, str]:
        """Of now."""
        setting = self.credentials.auth_settings().get("BearerToken")
        return {} if setting is None else {setting["key"]: setting["value"]}


def access_of(kubeconfig: Path | None, context: str | None, namespace: str | None) -> Access:
    """By kubeconfig or, in a pod without one, by its service account. Raises `ConfigError`."""
    from kubernetes import config
    from kubernetes.client import Configuration

    credentials = Configuration()
    try:
        own = _load(config, credentials, kubeconfig, context)
        tls = _tls(credentials)
    except (config.ConfigException, OSError, ValueError) as error:
        raise ConfigError(_teach_kubeconfig(error, kubeconfig, context)) from error
    return Access(
        host=credentials.host,
        namespace=namespace or own,
        tls=tls,
        server_name=credentials.tls_server_name,
        proxy=credentials.proxy,
        credentials=credentials,
    )


def _load(config: Any, credentials: Any, kubeconfig: Path | None, context: str | None) -> str:
    """Fills `credentials`; returns the namespace that is meant when none is said."""
    file = None if kubeconfig is None else str(kubeconfig)
    if file is None and context is None and not _has_kubeconfig(config):
        if not SERVICE_ACCOUNT.exists():
            raise config.ConfigException("there is none, and this is no pod")
        config.load_incluster_config(client_configuration=credentials)
        return (SERVICE_ACCOUNT / "namespace").read_text("ascii").strip()
    config.load_kube_config(config_file=file, context=context, client_configuration=credentials)
    contexts, current = config.list_kube_config_contexts(config_file=file)
    chosen = current if context is None else next(one for one in contexts if one["name"] == context)
    return str(chosen["context"].get("namespace") or "default")


def _has_kubeconfig(config: Any) -> bool:
    places = str(config.KUBE_CONFIG_DEFAULT_LOCATION).split(":")
    return any(Path(place).expanduser().is_file() for place in places if place)


def _teach_kubeconfig(error: Exception, kubeconfig: Path | None, context: str | None) -> str:
    if context is not None and context in str(error):
        return f"--context {quoted(context)}: not in the kubeconfig; `kubectl config get-contexts` lists them"
    place = "KUBECONFIG or ~/.kube/config" if kubeconfig is None else f"--kubeconfig {kubeconfig}"
    return f"{place}: no usable kubeconfig ({quoted(str(error))}); `kubectl cluster-info` should work first"


def _tls(credentials: Any) -> ssl.SSLContext | None:
    if not str(credentials.host).startswith("https:"):
        return None
    context = ssl.create_default_context(cafile=credentials.ssl_ca_cert, cadata=credentials.ca_cert_data)
    if not credentials.verify_ssl:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if credentials.cert_file:
        context.load_cert_chain(credentials.cert_file, credentials.key_file)
    return context


class Cluster(AbstractContextManager["Cluster"]):
    """Requests to the API server, until the block ends. All methods raise `ClusterError`."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self.namespace = access.namespace
        self._client = httpx.Client(
            base_url=access.host,
            verify=True if access.tls is None else access.tls,
            proxy=access.proxy,
            timeout=TIMEOUT,
        )

    @classmethod
    def of(cls, args: argparse.Namespace) -> Self:
        """By the flags of a command. Raises `ConfigError`."""
        return cls(access_of(args.kubeconfig, args.context, args.namespace))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._client.close()

    def services(self, name: str | None = None, *, everywhere: bool = False) -> list[Object]:
        """ModelServices: one by its name, or all."""
        if name is not None:
            return [self.request("GET", self._custom(SERVICES, self.namespace, name), about=f"ModelService {name!r}")]
        return self._list(self._custom(SERVICES, None if everywhere else self.namespace))

    def pools(self, namespace: str) -> list[Object]:
        return self._list(self._custom(POOLS, namespace))

    def pods(self, namespace: str, selector: str) -> list[Object]:
        return self._list(f"api/v1/namespaces/{namespace}/pods", labelSelector=selector)

    def pod(self, name: str) -> Object:
        return self.request("GET", self._pod(name), about=f"pod {name!r}")

    def secret(self, name: str) -> Object:
        return self.request(
            "GET", f"api/v1/namespaces/{self.namespace}/secrets/{quote(name, safe='')}", about=f"Secret {name!r}"
        )

    def patch_service(self, name: str, patch: Object) -> Object:
        about = f"ModelService {name!r}"
        return self.request("PATCH", self._custom(SERVICES, self.namespace, name), patch, about=about)

    def scale_pool(self, name: str, replicas: int) -> Object:
        path = f"{self._custom(POOLS, self.namespace, name)}/scale"
        return self.request("PATCH", path, {"spec": {"replicas": replicas}}, about=f"WorkerPool {name!r}")

    def evict(self, pod: str) -> Object:
        """Ask for the pod to leave, as `kubectl drain` does: refused (429) when a disruption budget forbids it now."""
        body = {"kind": "Eviction", "apiVersion": self._eviction_version(), "metadata": {"name": pod}}
        return self.request("POST", f"{self._pod(pod)}/eviction", body, about=f"pod {pod!r}")

    def request(
        self, method: str, path: str, body: Object | None = None, *, about: str, query: Mapping[str, str] | None = None
    ) -> Object:
        """The answer's JSON."""
        headers = {"Accept": "application/json", **self.access.headers()}
        if body is not None:
            headers["Content-Type"] = MERGE if method == "PATCH" else "application/json"
        content = None if body is None else json.dumps(body)
        extensions = {} if self.access.server_name is None else {"sni_hostname": self.access.server_name}
        try:
            response = self._client.request(
                method, path, content=content, headers=headers, params=query, extensions=extensions
            )
        except httpx.HTTPError as error:
            raise ClusterError(
                f"the API server {self.access.host} does not answer ({error!r}): is this the right context?"
            ) from error
        if response.is_success:
            answer: Object = response.json()
            return answer
        raise ClusterError(_teach(response, path, about), status=response.status_code)

    def _list(self, path: str, **query: str) -> list[Object]:
        found: list[Object] = []
        more: Mapping[str, str] = {}
        while True:
            answer = self.request("GET", path, about=path, query={"limit": str(PAGE), **query, **more})
            found += answer["items"]
            token = answer["metadata"].get("continue")
            if not token or len(found) > MAX_OBJECTS:
                return found
            more = {"continue": token}

    def _eviction_version(self) -> str:
        """`policy/v1`, or what this API server has instead."""
        resources = self.request("GET", "api/v1", about="the core API")["resources"]
        found: Object = next((one for one in resources if one["name"] == "pods/eviction"), {})
        return f"{found.get('group', 'policy')}/{found.get('version', 'v1')}"

    def _pod(self, name: str) -> str:
        return f"api/v1/namespaces/{self.namespace}/pods/{quote(name, safe='')}"

    def _custom(self, plural: str, namespace: str | None, name: str | None = None) -> str:
        place = "" if namespace is None else f"/namespaces/{namespace}"
        return f"{API}{place}/{plural}" + ("" if name is None else f"/{quote(name, safe='')}")


def _teach(response: httpx.Response, path: str, about: str) -> str:
    """A refusal in one sentence, with what to do."""
    said = _message(response)
    match response.status_code:
        case 401:
            return f"the API server rejected the credentials ({said}): log in again, check with `kubectl auth whoami`"
        case 403:
            return f"not permitted: {said}. An administrator can grant it with a Role (docs/kubectl-tandem.md#rights)"
        case 404 if path.startswith(API) and not _is_status(response):
            return "this cluster has no CRD of ModelServices: run `kubectl apply --server-side -f charts/tandem/crds/`"
        case 404:
            return f"{about} does not exist here: {said}"
        case 429:
            return f"the API server is busy: {said}"
    return f"the API server answers {response.status_code}: {said}"


def _is_status(response: httpx.Response) -> bool:
    """Whether it tells of an object; of a kind that it does not know the API server says so in plain text."""
    return bool(response.headers.get("content-type", "").startswith("application/json"))


def _message(response: httpx.Response) -> str:
    try:
        message = response.json().get("message")
    except (ValueError, AttributeError):
        message = None
    return quoted(str(message or response.text or response.reason_phrase))
