"""`kubectl tandem adapters`: what statuses of services and of ModelAdapters have."""

import pytest

from tandem_services.cli.k8s import command
from tandem_services.cli.k8s.resources import adapters_table
from tandem_testing.forwarding_api_server import ForwardingApiServer
from tandem_testing.kubernetes_objects import SERVICES, deployed

ADAPTERS = "/apis/tandem.dev/v1beta1/namespaces/models/modeladapters"
REASON = "r of layer 0 is 128"
LOADED = {
    "name": "sql",
    "source": "claims/adapters/sql",
    "digest": "a" * 32,
    "state": "Loaded",
    "prefill": 1,
    "decode": 2,
}
FAILED = {
    "name": "law",
    "modelAdapter": "team-law",
    "source": "claims/adapters/law",
    "state": "Failed",
    "message": "1 workers have not carried out the command",
    "failed": [{"name": "d-1", "reason": REASON}],
}


def service(*adapters, name="llama"):
    return {"metadata": {"name": name, "namespace": "models"}, "status": {"adapters": list(adapters)}}


def model_adapter(name, **conditions):
    """`conditions`: by type, as a pair of status and reason."""
    listed = [
        {"type": kind, "status": status, "reason": reason, "message": f"because of {reason}"}
        for kind, (status, reason) in conditions.items()
    ]
    spec = {"serviceName": "llama", "source": {"claim": {"claimName": "c", "path": name}}}
    return {"metadata": {"name": name}, "spec": spec, "status": {"conditions": listed}}


def rows(text):
    return [line.split() for line in text.splitlines()[1:]]


def test_each_adapter_has_its_digest_workers_and_failures():
    first, second = rows(adapters_table([service(LOADED, FAILED)], []))
    assert first == ["sql", "llama", "Loaded", "spec", "claims/adapters/sql", "a" * 32, "1", "2"]
    assert second[:4] == ["law", "llama", "Failed", "ModelAdapter"]
    assert second[4:9] == ["team-law", "claims/adapters/law", "-", "0", "0"]
    assert " ".join(second[9:]) == f"d-1: {REASON}", "each worker's reason instead of the summary"


def test_model_adapters_that_are_not_served_have_their_reason():
    unseen, refused = model_adapter("new"), model_adapter("taken", Accepted=("False", "NameTaken"))
    served = model_adapter("sql", Accepted=("True", "Accepted"))
    first, second = rows(adapters_table([], [unseen, refused, served]))
    assert first[:3] == ["new", "llama", "Pending"]
    assert second[:6] == ["taken", "llama", "NameTaken", "ModelAdapter", "taken", "claims/c/taken"]
    assert " ".join(second[9:]) == "because of NameTaken"


def test_without_adapters_the_fields_are_named():
    assert "spec.adapters" in adapters_table([service()], [])


@pytest.fixture
def kubectl(tmp_path, capsys):
    with ForwardingApiServer(objects=deployed()) as api:
        api.objects[SERVICES][0]["status"]["adapters"] = [LOADED]
        config = api.kubeconfig(tmp_path)

        def run(*words):
            status = command.main([*words, "--kubeconfig", str(config)])
            return status, capsys.readouterr().out

        yield run, api


def test_command_reads_services_and_model_adapters(kubectl):
    run, api = kubectl
    api.objects[ADAPTERS] = [model_adapter("taken", Accepted=("False", "NameTaken"))]
    status, out = run("adapters", "llama")
    assert (status, [row[0] for row in rows(out)]) == (0, ["sql", "taken"])


def test_cluster_without_model_adapters_is_no_error(kubectl):
    run, _ = kubectl
    status, out = run("adapters")
    assert (status, [row[0] for row in rows(out)]) == (0, ["sql"])


def test_reason_in_a_status_moves_no_cursor_of_a_terminal():
    failed = {**FAILED, "failed": [{"name": "d-1", "reason": "a\x1b[2J\nb"}]}
    [_, row] = adapters_table([service(failed)], []).split("\n")
    assert row.endswith(r"d-1: a\x1b[2J\x0ab")
