"""`tandem doctor`: its output, exit status and bundle."""

import io
import json
import stat
import tarfile
from pathlib import Path

import pytest

from tandem_services.cli.doctor import command
from tandem_services.cli.doctor.bundle import shown_log
from tandem_services.cli.doctor.finding import Check, fail, ok, warn
from tandem_services.cli.main import main
from tandem_services.cli.run_dir import prepare_run_dir

PROMPT, SECRET, TOKEN = "canary-of-a-prompt", "canary-of-a-secret", "hf_canaryOfAToken"


@pytest.fixture
def checked(monkeypatch):
    """`checked(finding, …)`: what the checks find."""

    def set_findings(*findings):
        checks = [Check(name=f"check {number}", probe=lambda it=it: it) for number, it in enumerate(findings)]
        monkeypatch.setattr(command, "all_checks", lambda *_: checks)

    return set_findings


def bundled_texts(path: Path) -> dict[str, str]:
    with tarfile.open(fileobj=io.BytesIO(path.read_bytes())) as archive:
        return {entry.name: archive.extractfile(entry).read().decode() for entry in archive}


def test_warnings_end_with_status_zero_and_failures_with_one(checked, capsys):
    checked(ok("fine"), warn("slow", "do this"))
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "ok    check 0           fine",
        "warn  check 1           slow",
        "                        fix: do this",
    ]
    checked(ok("fine"), fail("broken", "do that"))
    assert main(["doctor"]) == 1
    assert "FAIL  check 1           broken" in capsys.readouterr().out


def test_json_has_one_object_per_check(checked, capsys):
    checked(ok("fine"), fail("broken", "do that"))
    assert main(["doctor", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["checks"] == [
        {"name": "check 0", "status": "ok", "fact": "fine", "fix": ""},
        {"name": "check 1", "status": "fail", "fact": "broken", "fix": "do that"},
    ]
    assert document["version"]


def test_all_checks_have_names_of_their_own(tmp_path):
    from tandem_services.cli.doctor.finding import Machine
    from tandem_services.cli.main import build_parser

    args = build_parser().parse_args(["doctor", "--run-dir", str(tmp_path)])
    names = [check.name for check in command.all_checks(args, Machine(variables={"HOME": str(tmp_path)}))]
    assert len(names) == len({*names}) == 21
    assert list(tmp_path.iterdir()) == []


LOG = f"""\
2026-11-27T08:00:00 09:10:11.123 INFO    tandem.gateway started port=8000
09:10:11.124 DEBUG   tandem.gateway got the text {PROMPT}
09:10:12.000 WARNING tandem.gateway refused: text must be short, got '{PROMPT} it\\'s'
09:10:12.100 ERROR   tandem.redis cannot reach redis://user:a/b@{SECRET}@127.0.0.1:1/0 with Bearer {SECRET}
Traceback (most recent call last):
  File "/opt/tandem/gateway.py", line 7, in answer
    raise ValueError("{PROMPT}")
ValueError: invalid text {PROMPT}
09:10:12.200   File "/opt/tandem/worker.py", line 8, in answer
09:10:12.200 KeyError: invalid text {PROMPT}
09:10:12.200 {PROMPT}
{PROMPT}
{{"time": "t", "level": "INFO", "logger": "l", "message": "done", "text": "{PROMPT}", "exception": "{PROMPT}"}}
{{"time": "t", "level": "DEBUG", "logger": "l", "message": "{PROMPT}"}}
{{"time": "t", {PROMPT}
123:M 27 Nov 2026 08:53:49.547 * Ready to accept connections
09:10:13.000 INFO    tandem.worker download with {TOKEN} and password={SECRET}
"""


def test_log_of_a_bundle_has_events_without_texts_and_secrets():
    shown = shown_log(LOG)
    assert "canary" not in shown
    assert shown.splitlines() == [
        "2026-11-27T08:00:00 09:10:11.123 INFO    tandem.gateway started port=8000",
        "09:10:12.000 WARNING tandem.gateway refused: text must be short, got '…'",
        "09:10:12.100 ERROR   tandem.redis cannot reach redis://…@127.0.0.1:1/0 with Bearer …",
        "Traceback (most recent call last):",
        '  File "/opt/tandem/gateway.py", line 7, in answer',
        "ValueError",
        '  File "/opt/tandem/worker.py", line 8, in answer',
        "KeyError",
        '{"time": "t", "level": "INFO", "logger": "l", "message": "done"}',
        "123:M 27 Nov 2026 08:53:49.547 * Ready to accept connections",
        "09:10:13.000 INFO    tandem.worker download with … and password=…",
    ]


def test_bundle_has_no_canary_and_no_foreign_file(checked, monkeypatch, tmp_path, capsys):
    checked(fail(f"no answer of redis://:{SECRET}@h", "correct --redis-url"))
    for name in ("TANDEM_REDIS_URL", "TANDEM_API_KEY", "HF_TOKEN", "OTEL_EXPORTER_OTLP_HEADERS", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, SECRET)
    monkeypatch.setenv("TANDEM_CLUSTER", "blue")
    run_dir = prepare_run_dir(tmp_path / "run", files=["keys.json"], logs=["gateway.log"])
    (run_dir / "keys.json").write_text(SECRET)
    (run_dir / "gateway.log").write_text("x" * 300_000 + "\n" + LOG)
    (run_dir / "mine.log").write_text("09:10:11.123 INFO    tandem.gateway of the user\n")
    bundle = tmp_path / "report.tar.gz"
    assert main(["doctor", "--json", "--run-dir", str(run_dir), "--bundle", str(bundle)]) == 1
    assert json.loads(capsys.readouterr().out)["checks"]
    assert stat.S_IMODE(bundle.stat().st_mode) == 0o600
    files = bundled_texts(bundle)
    assert files.keys() == {
        f"tandem-doctor/{name}" for name in ("findings.json", "environment.json", "logs/run/gateway.log")
    }
    assert "canary" not in "".join(files.values())
    environment = json.loads(files["tandem-doctor/environment.json"])
    assert (environment["TANDEM_CLUSTER"], environment["HF_TOKEN"]) == ("blue", "(set)")
    assert "started port=8000" in files["tandem-doctor/logs/run/gateway.log"]


def test_bundle_that_cannot_be_written_is_named(checked, tmp_path, capsys):
    checked(ok("fine"))
    assert main(["doctor", "--run-dir", str(tmp_path), "--bundle", str(tmp_path / "no/report.tgz")]) == 3
    assert f"cannot write --bundle {tmp_path / 'no/report.tgz'}: No such file" in capsys.readouterr().err
