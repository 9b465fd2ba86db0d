"""`kubectl tandem …` from the command line to its output, against objects at hand."""

import json
import re
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest
import yaml

from tandem_operator.telemetry.worker_control import order_token
from tandem_services.cli import main as tandem
from tandem_services.cli.k8s import actions, command
from tandem_services.cli.k8s.cluster import Cluster, access_of
from tandem_testing.forwarding_api_server import ForwardingApiServer
from tandem_testing.kubernetes_objects import KEY_FILE, PODS, POOLS, SECRETS, SERVICES, deployed, follower, pod

COMMANDS = ["status", "roles", "flip", "queue", "drain", "explain", "decisions", "adapters", "chat", "scale"]


@pytest.fixture
def api():
    with ForwardingApiServer(objects=deployed()) as api:
        yield api


@pytest.fixture
def kubectl(api, tmp_path, capsys):
    """Run a command; returns its exit status, output and errors."""
    config = api.kubeconfig(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        status = command.main([*words, "--kubeconfig", str(config)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


# The parser


@pytest.mark.parametrize("words", [[], *[[name] for name in COMMANDS]])
def test_every_command_explains_itself_under_both_names(words, capsys):
    for run, prog in ((command.main, "kubectl tandem"), (lambda argv: tandem.main(["k8s", *argv]), "tandem k8s")):
        with pytest.raises(SystemExit) as stopped:
            run([*words, "--help"])
        assert stopped.value.code == 0
        assert capsys.readouterr().out.startswith(f"usage: {' '.join([prog, *words])} ")


def test_help_needs_neither_the_client_nor_an_engine():
    modules = "import sys, tandem_services.cli.k8s.command; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", modules], capture_output=True, text=True, check=True).stdout.split()
    assert not {"kubernetes", "httpx", "websocket", "yaml", "torch", "numpy"} & set(loaded)


def test_help_is_there_at_once():
    """A bound far above what it takes, so that only an import of something large breaks it."""
    began = time.process_time()
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "tandem_services.cli.k8s.command", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert time.process_time() - began < 5
    [total] = [line for line in done.stderr.splitlines() if line.endswith("tandem_services.cli.entry")]
    assert int(total.split("|")[1]) < 300_000


# status, roles, queue, decisions


def test_status_is_tree_from_api_server_alone(kubectl, api):
    status, out, _ = kubectl("status", "llama", "--no-figures")
    assert status == 0
    assert re.search(r"^llama +Progressing", out, re.MULTILINE)
    assert re.search(r"└─ llama-decode-5d8f-b +Unschedulable", out)
    assert api.selectors == ["tandem.dev/service=llama"]


@pytest.mark.parametrize(("kind", "read"), [("json", json.loads), ("yaml", yaml.safe_load)])
def test_status_is_a_document_for_programs(kubectl, kind, read):
    status, out, _ = kubectl("status", "--no-figures", "-o", kind)
    [tree] = read(out)
    assert status == 0
    assert (tree["name"], tree["namespace"], tree["observed"]) == ("llama", "models", True)
    decode = next(role for role in tree["roles"] if role["role"] == "decode")
    assert (decode["wanted"], decode["ready"]) == (2, 1)
    assert [pod["pod"]["state"] for pod in decode["revisions"][0]["pods"]] == ["Ready", "Unschedulable"]


def test_unreachable_pods_are_shown_with_reason(kubectl):
    _, out, _ = kubectl("status")
    assert "no response: the kubelet reports: nobody listens on 9090" in out
    assert "not counted" in kubectl("queue")[1]


def test_empty_result_names_searched_namespace(kubectl, api):
    api.objects[SERVICES] = []
    for name in ("status", "roles", "queue", "decisions"):
        assert kubectl(name)[:2] == (0, "no ModelService in namespace models (-n NAME, -A for all)\n")
    api.objects["/apis/tandem.dev/v1beta1/modelservices"] = []
    assert kubectl("status", "-A")[1] == "no ModelService in any namespace\n"


def test_status_watch_continues_while_api_server_is_unavailable(kubectl, api, monkeypatch):
    states = iter([500, KeyboardInterrupt()])

    def sleep(seconds: float) -> None:
        assert seconds == 7.0
        state = next(states)
        if isinstance(state, BaseException):
            raise state
        api.objects[SERVICES] = state

    monkeypatch.setattr("tandem_services.cli.k8s.views.time.sleep", sleep)
    status, out, _ = kubectl("status", "--no-figures", "-w", "--every", "7")
    assert status == 130
    assert out.count("llama-gateway-7c") == 1
    assert "the API server answers 500" in out


# Errors that teach


@pytest.mark.parametrize(
    ("refusal", "expected"),
    [
        (401, "log in again"),
        (403, "not permitted: .*Forbidden.*with a Role"),
        (404, "ModelService 'llama' does not exist here"),
        (500, "the API server answers 500"),
    ],
)
def test_refusal_names_the_fix(kubectl, api, refusal, expected):
    api.objects[f"{SERVICES}/llama"] = refusal
    status, _, err = kubectl("status", "llama")
    assert status == 3
    assert re.search(expected, err)


def test_missing_kubeconfig_error_names_flag(tmp_path, capsys):
    assert command.main(["status", "--kubeconfig", str(tmp_path / "none")]) == 2
    assert f"--kubeconfig {tmp_path / 'none'}: no usable kubeconfig" in capsys.readouterr().err


def test_context_that_is_not_there_is_named(kubectl):
    status, _, err = kubectl("status", "--context", "prod")
    assert status == 2
    assert "--context prod: not in the kubeconfig" in err


def test_api_server_that_is_away_is_named(tmp_path, capsys):
    with ForwardingApiServer() as api:
        config, url = api.kubeconfig(tmp_path), api.url
    assert command.main(["status", "--kubeconfig", str(config)]) == 3
    assert f"the API server {url} does not answer" in capsys.readouterr().err


def test_namespace_is_the_flag_or_the_contexts(api, tmp_path):
    config = api.kubeconfig(tmp_path, namespace="elsewhere")
    assert access_of(config, None, None).namespace == "elsewhere"
    assert access_of(config, "test", "here").namespace == "here"


# Orders


def test_scale_patches_replicas_without_autoscaler(kubectl, api):
    status, out, _ = kubectl("scale", "llama", "--prefill", "2", "--decode", "4")
    assert (status, out) == (0, "llama: 2 prefill, 4 decode wanted\n")
    spec = {"prefill": {"replicas": 2}, "decode": {"replicas": 4}}
    assert api.writes == [("PATCH", f"{SERVICES}/llama", {"spec": spec})]


def test_scale_patches_worker_pool_with_external_autoscaling(kubectl, api):
    api.objects |= deployed(autoscaling={"mode": "external"})
    assert kubectl("scale", "llama", "--decode", "0")[0] == 0
    assert api.writes == [("PATCH", f"{POOLS}/llama-decode/scale", {"spec": {"replicas": 0}})]
    api.objects[POOLS] = []
    status, _, err = kubectl("scale", "llama", "--decode", "1")
    assert status == 3
    assert "has no WorkerPool of decode yet" in err


@pytest.mark.parametrize(
    ("spec", "words", "expected"),
    [
        ({"autoscaling": {"mode": "internal"}}, ["--decode", "2"], "the autoscaler sets the number of workers"),
        ({}, [], "say how many: --prefill N, --decode N, or both"),
    ],
)
def test_scale_without_effect_or_count_is_rejected(kubectl, api, spec, words, expected):
    api.objects |= deployed(**spec)
    status, _, err = kubectl("scale", "llama", *words)
    assert (status, api.writes) == (2, [])
    assert expected in err


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
def test_pod_is_evicted_by_served_eviction_version(kubectl, api, version):
    eviction = {"name": "pods/eviction", "group": "policy", "version": version}
    api.objects["/api/v1"] = {"resources": [eviction]}
    status, out, _ = kubectl("drain", "llama-decode-5d8f-a", "--no-wait")
    assert status == 0
    assert "draining" in out
    [(method, path, body)] = api.writes
    assert (method, path) == ("POST", f"{PODS}/llama-decode-5d8f-a/eviction")
    assert (body["apiVersion"], body["metadata"]["name"]) == (f"policy/{version}", "llama-decode-5d8f-a")


def test_drain_reports_blocking_disruption_budget(kubectl, api):
    api.objects |= {"/api/v1": {"resources": []}, f"POST {PODS}/llama-decode-5d8f-a/eviction": 429}
    status, _, err = kubectl("drain", "llama-decode-5d8f-a")
    assert status == 1
    assert "Its disruption budget forbids it" in err


def test_drain_ends_with_pod_or_reports_remaining_pod(api, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(actions, "PATIENCE_S", 5.0)
    api.objects[f"{PODS}/llama-decode-5d8f-a"]["spec"]["terminationGracePeriodSeconds"] = 5
    pods = [api.objects[f"{PODS}/llama-decode-5d8f-a"]]
    with Cluster(access_of(api.kubeconfig(tmp_path), None, None)) as cluster:

        def replaced(_: float) -> None:
            pods[0]["metadata"]["uid"] = "another"

        pod = json.loads(json.dumps(pods[0]))
        assert actions.until_gone(cluster, pod, sleep=replaced) == 0
        assert "is gone" in capsys.readouterr().out
        slept: list[float] = []
        assert actions.until_gone(cluster, json.loads(json.dumps(pods[0])), sleep=slept.append) == 1
        assert sum(slept) == 10
        del api.objects[f"{PODS}/llama-decode-5d8f-a"]
        assert actions.until_gone(cluster, pod, sleep=slept.append) == 0


def test_follower_pod_drains_with_status_from_its_leader(api, tmp_path, capsys, metrics_port):
    leader, other = pod("llama-decode-5d8f-0", role="decode"), follower("llama-decode-5d8f-0-1")
    for one in (leader, other):
        api.objects[f"{PODS}/{one['metadata']['name']}"] = one
    api.objects["/api/v1"] = {"resources": []}
    config = ["--kubeconfig", str(api.kubeconfig(tmp_path))]
    assert command.main(["drain", "llama-decode-5d8f-0-1", "--no-wait", *config]) == 0
    assert "is draining, with all pods of worker llama-decode-5d8f-0:" in capsys.readouterr().out
    [(_, path, _)] = api.writes
    assert path == f"{PODS}/llama-decode-5d8f-0-1/eviction"
    api.ports["llama-decode-5d8f-0", 9090] = metrics_port
    with Cluster(access_of(api.kubeconfig(tmp_path), None, None)) as cluster:

        def gone(_: float) -> None:
            api.objects.pop(f"{PODS}/llama-decode-5d8f-0-1")

        assert actions.until_gone(cluster, other, sleep=gone) == 0
        assert "  3 running, 0 waiting" in capsys.readouterr().out
        # Where the leader has exited already there is no peer to query, and that is no error.
        api.objects[f"{PODS}/llama-decode-5d8f-0-1"] = other
        del api.objects[f"{PODS}/llama-decode-5d8f-0"]
        assert actions.until_gone(cluster, other, sleep=gone) == 0


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["flip", "llama-gateway-7c", "decode"], "is a gateway: only workers have roles"),
        (["flip", "llama-decode-5d8f-0-1", "prefill"], "have one role together: flip llama-decode-5d8f-0"),
        (["flip", "nobody", "decode"], "pod 'nobody' does not exist here"),
        (["drain", "foreign"], "belongs to no ModelService"),
    ],
)
def test_pod_without_worker_gets_no_commands(kubectl, api, words, error):
    api.objects[f"{PODS}/llama-decode-5d8f-0-1"] = follower("llama-decode-5d8f-0-1")
    api.objects[f"{PODS}/foreign"] = {"metadata": {"name": "foreign", "labels": {}}}
    status, _, err = kubectl(*words)
    assert (status, api.writes) == (3, [])
    assert error in err


# Through port-forwards (a real gateway: tests/integration/test_k8s_gateway.py)


class Worker(BaseHTTPRequestHandler):
    """A worker's control port."""

    orders: ClassVar[list[tuple[str, object]]] = []
    brought: ClassVar[list[str | None]] = []
    answer: ClassVar[int] = 200

    def log_message(self, *_):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.orders.append((self.path, body))
        self.brought.append(self.headers["authorization"])
        output = json.dumps({"detail": "it has one role for good"} if self.answer != 200 else {"role": body["role"]})
        self.send_response(self.answer)
        self.send_header("content-length", str(len(output)))
        self.end_headers()
        self.wfile.write(output.encode())


@pytest.fixture
def metrics_port():
    """A worker's control port, which tells that three requests run."""

    class Metrics(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_GET(self):
            text = b"tandem_worker_num_requests_running 3\n"
            self.send_response(200)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Metrics)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


@pytest.fixture
def worker(api):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Worker)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    api.ports["llama-decode-5d8f-a", 9090] = server.server_address[1]
    Worker.orders, Worker.brought, Worker.answer = [], [], 200
    yield Worker
    server.shutdown()
    server.server_close()


def test_flip_is_an_order_to_the_worker(kubectl, worker):
    status, out, err = kubectl("flip", "llama-decode-5d8f-a", "prefill")
    assert (status, err) == (0, "")
    assert out == "llama-decode-5d8f-a serves as prefill from now on; after a restart as decode\n"
    assert worker.orders == [("/role", {"role": "prefill"})]
    assert worker.brought == [f"Bearer {order_token(KEY_FILE)}"]


def test_flip_without_the_key_file_is_refused(kubectl, api, worker):
    api.objects[f"{SECRETS}/llama-curve"] = {"data": {}}
    status, _, err = kubectl("flip", "llama-decode-5d8f-a", "prefill")
    assert (status, worker.orders) == (3, [])
    assert "Secret llama-curve: keys.json is not a key file" in err


def test_flip_warns_that_autoscaler_may_undo_it(kubectl, api, worker):
    api.objects |= deployed(autoscaling={"mode": "internal"})
    status, _, err = kubectl("flip", "llama-decode-5d8f-a", "prefill")
    assert status == 0
    assert "the autoscaler flips roles" in err


def test_worker_that_refuses_a_flip_is_quoted(kubectl, worker):
    worker.answer = 409
    status, _, err = kubectl("flip", "llama-decode-5d8f-a", "both")
    assert status == 1
    assert "it has one role for good" in err


def test_worker_that_cannot_be_reached_for_a_flip_is_named(kubectl):
    status, _, err = kubectl("flip", "llama-prefill-5d8f-a", "both")
    assert status == 3
    assert "cannot reach pod llama-prefill-5d8f-a: the kubelet reports" in err
