"""`kubectl tandem caches`: the statuses of ModelCaches, and which services use them."""

from tandem_services.cli.k8s import command
from tandem_services.cli.k8s.resources import caches_table
from tandem_testing.forwarding_api_server import ForwardingApiServer
from tandem_testing.kubernetes_objects import deployed

CACHES = "/apis/tandem.dev/v1beta1/namespaces/models/modelcaches"


def cache(name="qwen", **status):
    return {"metadata": {"name": name}, "spec": {"source": {"huggingFace": {"id": "org/mini"}}}, "status": status}


def service(name, cache_name):
    return {"metadata": {"name": name}, "spec": {"model": {"cacheRef": {"name": cache_name}}}}


def rows(caches, services=()):
    return [line.split() for line in caches_table(caches, services).splitlines()[1:]]


def test_download_shows_its_rate_and_its_file():
    under_way = cache(state="Downloading", progress="25%", size="16.4 GB", bytesPerSecond=5_000_000, currentFile="m.st")
    (row,) = rows([under_way])
    assert row == ["qwen", "org/mini", "main", "Downloading", "25%", "16.4", "GB", "5.0", "MB/s", "-", "-", "m.st"]


def test_ready_cache_shows_its_services():
    ready = cache(state="Ready", progress="100%", size="5.0 GB", commit="a" * 40)
    (row,) = rows([ready], [service("chat", "qwen"), service("code", "qwen"), service("other", "else")])
    assert row[-3:] == ["a" * 12, "chat,", "code"]


def test_failure_shows_the_whole_message():
    failed = {
        "type": "Failed",
        "status": "True",
        "reason": "NoSpace",
        "message": "spec.storage.newClaim.size: raise it",
    }
    assert "NoSpace: spec.storage.newClaim.size: raise it" in caches_table([cache(conditions=[failed])], [])


def test_empty_cache_list_explains_how_to_create_one():
    assert "docs/model-cache.md" in caches_table([], [])


def test_command_reads_caches_and_services(tmp_path, capsys):
    with ForwardingApiServer(objects=deployed()) as api:
        api.objects[CACHES] = [cache(state="Ready")]
        assert command.main(["caches", "--kubeconfig", str(api.kubeconfig(tmp_path))]) == 0
    assert "Ready" in capsys.readouterr().out


def test_cluster_without_model_caches_is_no_error(tmp_path, capsys):
    with ForwardingApiServer(objects=deployed()) as api:
        assert command.main(["caches", "--kubeconfig", str(api.kubeconfig(tmp_path))]) == 0
    assert "no model caches" in capsys.readouterr().out
