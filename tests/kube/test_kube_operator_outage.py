"""The API server goes away and comes back while the operator runs [api-server-absent]."""

import asyncio
import json
from contextlib import ExitStack
from urllib.parse import urlsplit

import pytest

from tandem_testing.control_plane import KUBE, PATIENCE_S
from tandem_testing.kube_services import Services
from tandem_testing.operator_process import operator
from tandem_testing.tcp_proxy import CALM, TcpProxy, Weather
from tandem_testing.waiting import wait_equal, wait_for

pytestmark = KUBE

LEASE = ("--lease-duration", "8", "--renew-deadline", "6", "--retry-period", "0.5")


@pytest.fixture
async def proxy(control_plane):
    """What stands between the operator and the API server."""
    config = json.loads(control_plane.kubeconfig.read_text())
    server = urlsplit(config["clusters"][0]["cluster"]["server"])
    proxy = await TcpProxy.open(lambda: (server.hostname, server.port))
    yield proxy
    await proxy.close()


@pytest.fixture
def kubeconfig(operator_kubeconfig, proxy, tmp_path):
    """The operator's, by way of the proxy."""
    config = json.loads(operator_kubeconfig.read_text())
    config["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{proxy.port}"
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps(config))
    return path


async def test_changes_during_api_server_outage_are_reconciled(control_plane, namespace, proxy, kubeconfig, tmp_path):
    """Watches break, the lease runs out, an object is deleted and another edited without a watch that reports it."""
    services = Services(control_plane, namespace)
    front = f"/api/v1/namespaces/{namespace}/services/chat-gateway"
    gateway = f"/apis/apps/v1/namespaces/{namespace}/deployments/chat-gateway"
    flags = ("--namespaces", namespace, "--operator-namespace", namespace, *LEASE)

    def begin():
        running = stack.enter_context(operator(kubeconfig, tmp_path / "operator.log", *flags))
        services.apply()
        services.wait_ready()
        return running

    def change():
        wait_for(lambda: not running.leading, PATIENCE_S, running.log)
        assert running.get("/livez").status_code == 200
        control_plane.api.delete(front).raise_for_status()
        control_plane.merge(gateway, {"spec": {"replicas": 5}}).raise_for_status()

    def repaired():
        wait_for(lambda: running.leading, PATIENCE_S, running.log)
        wait_equal(lambda: control_plane.api.get(front).status_code, 200, PATIENCE_S, running.log)
        wait_equal(lambda: control_plane.get(gateway)["spec"]["replicas"], 1, PATIENCE_S, running.log)
        services.apply(decode={"replicas": 2})
        services.wait_ready()
        assert running.stop() == 0

    with ExitStack() as stack:
        # What waits does so beside the loop that the proxy runs on.
        running = await asyncio.to_thread(begin)
        proxy.weather = Weather(refusing=True)
        proxy.cut()
        await asyncio.to_thread(change)
        proxy.weather = CALM
        await asyncio.to_thread(repaired)
