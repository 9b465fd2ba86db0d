"""`tandem-operator`: flags, and the errors for wrong ones."""

import io
import json
import logging
import socket

import pytest

from tandem_operator.cli import configure_logging, main, options_of, parser


def options(*words):
    return options_of(parser().parse_args(words))


def test_defaults_are_those_of_a_pod_of_two(monkeypatch):
    monkeypatch.delenv("POD_NAMESPACE", raising=False)
    found = options()
    assert found.namespaces == ()
    assert found.settings.canaries
    assert found.election is not None
    assert (found.election.namespace, found.election.duration_s) == ("tandem-system", 15.0)


def test_operator_flags_reach_their_settings(monkeypatch):
    monkeypatch.setenv("POD_NAMESPACE", "serving")
    found = options("--namespaces", "a, b", "--canary", "off", "--engine-image", "local/engine:1", "--workers", "2")
    assert found.namespaces == ("a", "b")
    assert (found.settings.canaries, found.settings.engine_image, found.workers) == (False, "local/engine:1", 2)
    assert options("--cuda-engine-image", "local/engine:2").settings.cuda_engine_image == "local/engine:2"
    assert found.settings.operator_namespace == found.election.namespace == "serving"
    assert options("--no-leader-elect").election is None
    assert options("--allow", "privileged, host-paths").settings.allow == {"host-paths", "privileged"}
    assert options().settings.allow == frozenset()


def test_two_processes_are_never_the_same_candidate():
    assert options().election.identity != options().election.identity


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--namespaces", ","), "name at least one namespace"),
        (("--workers", "0"), "'0' is not a number above 0"),
        (("--allow", "root"), "'root' is none of service-accounts, host-paths, privileged, routes, monitors"),
        (("--renew-deadline", "20"), "lease duration 15 s must be above the renew deadline 20 s"),
    ],
)
def test_wrong_flags_are_refused_with_what_to_do(words, sentence, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err


def test_operator_help_lists_its_main_flags(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    for flag in ("--namespaces", "--canary", "--lease-duration", "--http-port", "--log-format"):
        assert flag in text
    assert "kubectl explain modelservice.spec" in text


@pytest.fixture
def restored():
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = before, level
    root.setLevel(level)


def test_logs_are_one_json_object_per_line(restored):
    stream = io.StringIO()
    configure_logging("json", "info", stream)
    logger = logging.getLogger("tandem_operator.test")
    logger.info("two\nlines", extra={"object_name": "chat"})
    try:
        raise ValueError("broken")
    except ValueError:
        logger.exception("it failed")
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (first["message"], first["level"], first["logger"]) == ("two\nlines", "INFO", "tandem_operator.test")
    assert first["object_name"] == "chat"
    assert "ValueError: broken" in second["exception"]


def test_taken_port_and_missing_credentials_are_reported(monkeypatch, tmp_path, restored):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    words = ("--http-host", "127.0.0.1", "--log-level", "error")
    with pytest.raises(SystemExit, match="no credentials for a cluster: .*; set KUBECONFIG"):
        main((*words, "--http-port", "0"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with pytest.raises(SystemExit, match=f"127.0.0.1:{port}: .*; choose another --http-port"):
            main((*words, "--http-port", port))
