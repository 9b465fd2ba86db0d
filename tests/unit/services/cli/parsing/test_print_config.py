"""`--print-config`: a file that gives the same settings again, and no secrets. `--dry-run`: a plan, and no process."""

import os

import pytest

from tandem_services.cli.main import build_parser, main
from tandem_services.cli.parsing.print_config import config_text
from tandem_services.cli.parsing.settings_file import read_entries
from tandem_services.common.sockets import free_port, listen

CANARY = "canary-1f0e"

REQUIRED = {"up": [], "worker": ["--redis-url", "redis://h"], "gateway": ["--redis-url", "redis://h"]}
REQUIRED["router"] = REQUIRED["gateway"]


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    for name in os.environ:
        if name.startswith("TANDEM_"):
            monkeypatch.delenv(name)


def printed(capsys, *argv: str) -> str:
    assert main([*argv]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    return shown.out


def test_printed_settings_differ_only_where_flag_and_variable_do(tmp_path, monkeypatch, capsys):
    before = printed(capsys, "up", "--print-config")
    path = tmp_path / "c.yaml"
    path.write_text(before)
    monkeypatch.setenv("TANDEM_PORT", "9001")
    after = printed(capsys, "up", "--config", str(path), "--dtype", "bfloat16", "--print-config")
    pairs = zip(before.splitlines(), after.splitlines(), strict=True)
    changed = [new.split() for old, new in pairs if old.split("#")[0] != new.split("#")[0]]
    assert changed == [
        ["port:", "9001", "#", "environment", "TANDEM_PORT"],
        ["dtype:", "bfloat16", "#", "flag"],
    ]
    assert f"# {path}:2" in after.splitlines()[1]


@pytest.mark.parametrize("command", REQUIRED)
def test_printed_file_gives_the_same_settings_again(command, tmp_path, capsys):
    text = printed(capsys, command, *REQUIRED[command], "--print-config")
    path = tmp_path / "c.yaml"
    path.write_text(text)
    again = printed(capsys, command, "--config", str(path), "--print-config")
    values = [[line.split("  #")[0].rstrip() for line in each.splitlines()] for each in (text, again)]
    assert values[0] == values[1]
    assert len(values[0]) > 20


ODD = (*"true null no 1e3 010 08:00 0x10 0 -1 a/b {a} ~ @a *a '\" \u00fc".split(), "a b", "a #b", "- x", "")


@pytest.mark.parametrize("text", ODD)
def test_text_that_looks_like_something_else_is_quoted(text, tmp_path):
    given = ["worker", "--redis-url", "redis://h", "--cluster", text, "--allowed-hosts", text, text]
    path = tmp_path / "c.yaml"
    path.write_text(config_text("x", build_parser().parse_args(given).settings, {text: text}))
    *entries, names = read_entries(path)
    assert names.value == {text: text}
    found = {entry.key: entry.value for entry in entries}
    assert (found["cluster"], found["allowed-hosts"]) == ((text,), (text, text))


SECRETS = [
    (["up", "--redis-url", f"redis://:{CANARY}@h"], {}, ""),
    (["up", "--redis-url", f"redis://me:{CANARY}@h:1/0"], {}, ""),
    (["up", "--redis-url", f"redis://me:a@{CANARY}@h"], {}, ""),
    (["up", "--redis-url", f"redis://h?password={CANARY}"], {}, ""),
    (["up"], {"TANDEM_REDIS_URL": f"rediss://me:{CANARY}@h"}, ""),
    (["up"], {"TANDEM_API_KEY": CANARY, "OPENAI_API_KEY": CANARY}, ""),
    (["up"], {}, f"redis-url: redis://me:{CANARY}@h"),
    (["up"], {}, f"otlp-traces-endpoint: https://{CANARY}@collector:4318/?api-key={CANARY}"),
    (["up"], {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"https://a:{CANARY}@collector:4318"}, ""),
    (["up"], {}, f"redis-url: redis://me:{CANARY}@h\nport: x"),
    (["up"], {}, f"redis-url: [redis://me:{CANARY}@h]"),
    (["up"], {}, f"redis-url: {{a: redis://me:{CANARY}@h}}"),
    (["up"], {}, f"redis-url: 'redis://me:{CANARY}@h"),
    (["gateway", "--redis-url", f"redis://me:{CANARY}@h"], {"TANDEM_REDIS_URL": f"redis://me:{CANARY}@h"}, ""),
]


@pytest.mark.parametrize(("argv", "variables", "text"), SECRETS)
def test_secret_is_never_printed(argv, variables, text, tmp_path, monkeypatch, capfd):
    (tmp_path / "c.yaml").write_text(text)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    status = main([*argv, "--config", str(tmp_path / "c.yaml"), "--print-config"])
    shown = capfd.readouterr()
    assert CANARY not in shown.out + shown.err
    assert (status, bool(shown.out)) in ((0, True), (2, False))


def test_mask_of_a_secret_is_no_secret(tmp_path, capsys):
    """A printed file with `***` in it does not start with that as its password."""
    text = printed(capsys, "up", "--redis-url", f"redis://me:{CANARY}@h", "--print-config")
    assert 'redis-url: "redis://me:***@h"' in text
    path = tmp_path / "c.yaml"
    path.write_text(text)
    assert main(["up", "--config", str(path)]) == 2
    assert f"{path}:" in (sentence := capsys.readouterr().err)
    assert "redis-url: *** stands for a secret that --print-config does not show" in sentence


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["up", "--prefill", "0", "--decode", "0"], "nothing to start"),
        (["up", "--num-pages", "9", "--mem-fraction-static", "0.5"], "--num-pages and --mem-fraction-static both"),
        (["worker", "--redis-url", "redis://h", "--model", "/"], "no config.json"),
        (["gateway", "--redis-url", "redis://h", "--model", "/"], "no config.json"),
        (["router", "--redis-url", "redis://h", "--model", "/"], "no config.json"),
    ],
)
def test_print_config_rejects_settings_that_cannot_start(argv, sentence, capsys):
    assert main([*argv, "--print-config"]) == 2
    assert sentence in capsys.readouterr().err


def test_dry_run_prints_the_plan_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    argv = ["up", "--port", str(free_port("127.0.0.1")), "--decode", "2", "--threads", "3", "--dry-run"]
    lines = printed(capsys, *argv).splitlines()
    assert lines[0].startswith("`tandem up` would serve tandem-mini (")
    assert lines[1:] == [
        "  redis       a private server",
        "  prefill-0   --threads 3",
        "  decode-0    --threads 3",
        "  decode-1    --threads 3",
        "  gateway",
    ]
    assert not (tmp_path / "state").exists()
    assert CANARY not in printed(capsys, *argv, "--redis-url", f"redis://me:{CANARY}@h")


def test_dry_run_refuses_a_port_in_use(capsys):
    with listen("127.0.0.1", 0) as taken:
        assert main(["up", "--port", str(taken.getsockname()[1]), "--dry-run"]) == 3
    assert "choose another --host or --port" in capsys.readouterr().err
