"""Where the settings of a command come from, and which source wins."""

import os

import pytest

from tandem_engine.base.errors import ConfigError
from tandem_services.cli.entry import TeachingParser, teach
from tandem_services.cli.main import build_parser, main
from tandem_services.cli.parsing.flag_table import Sources, settings_of


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    for name in os.environ:
        if name.startswith("TANDEM_"):
            monkeypatch.delenv(name)


def parse(*argv: str):
    return build_parser().parse_args([*argv])


@pytest.fixture
def file(tmp_path):
    """A function that writes a file of settings and returns its path."""

    def write(text: str) -> str:
        path = tmp_path / "c.yaml"
        path.write_text(text)
        return str(path)

    return write


def origins(args) -> dict[str, tuple[object, str]]:
    return {one.setting.key: (one.value, one.origin) for one in args.settings}


def test_flag_wins_over_environment_and_file(file, monkeypatch):
    path = file("port: 1\nprefill: 2\ndecode: 3\n")
    monkeypatch.setenv("TANDEM_PORT", "4")
    monkeypatch.setenv("TANDEM_PREFILL", "5")
    found = origins(parse("up", "--config", path, "--port", "6"))
    assert found["port"] == (6, "flag")
    assert found["prefill"] == (5, "environment TANDEM_PREFILL")
    assert found["decode"] == (3, f"{path}:3")
    assert found["both"] == (0, "default")


def test_flag_with_its_default_value_wins(file):
    assert parse("up", "--config", file("port: 1\n"), "--port", "8000").port == 8000


def test_variable_names_the_file_and_a_flag_another(file, tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_CONFIG", file("port: 1\n"))
    assert parse("up").port == 1
    (tmp_path / "other.yaml").write_text("port: 2\n")
    assert parse("up", "--config", str(tmp_path / "other.yaml")).port == 2


def test_required_flag_may_be_set_in_a_file(file, capsys):
    assert parse("gateway", "--config", file("redis-url: redis://h\n")).redis_url == "redis://h"
    with pytest.raises(SystemExit) as stopped:
        main(["gateway"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.splitlines() == [
        "usage: tandem gateway [FLAG ...]",
        "tandem gateway: error: the following arguments are required: --redis-url",
    ]


def test_alias_is_the_same_setting(file):
    assert parse("up", "--config", file("max-model-len: 512\n")).context_length == 512
    with pytest.raises(ConfigError, match=r":2: max-model-len: the same setting as context-length: .*c.yaml:1"):
        parse("up", "--config", file("context-length: 1\nmax-model-len: 2\n"))


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("TANDEM_PORT", "80000", "TANDEM_PORT: must be between 0 and 65535, got 80000"),
        ("TANDEM_DTYPE", "int4", "TANDEM_DTYPE: invalid choice: 'int4'"),
        ("TANDEM_DISABLE_RADIX_CACHE", "yes", "TANDEM_DISABLE_RADIX_CACHE: must be true or false, got 'yes'"),
        ("TANDEM_CUDA_GRAPH_BS", "1 'x", "TANDEM_CUDA_GRAPH_BS: its words cannot be separated"),
        ("TANDEM_CONTEXT_LENGTH", "32K", "TANDEM_CONTEXT_LENGTH: must be a whole number, got '32K': k is 1,000"),
        ("TANDEM_MODEL", "a\x1b[31mb", "TANDEM_MODEL: has a character that cannot be printed"),
        ("TANDEM_REDIS_PASSWORD_FILE", "a\nb", "TANDEM_REDIS_PASSWORD_FILE: has a character that cannot be printed"),
    ],
)
def test_bad_variable_is_named(name, value, sentence, monkeypatch, capsys):
    monkeypatch.setenv(name, value)
    assert main(["up", "--print-config"]) == 2
    shown = capsys.readouterr()
    assert sentence in shown.err
    assert (shown.out, shown.err.count("\n")) == ("", 1)


def test_bad_value_is_refused_where_a_flag_overrides_it(file, monkeypatch):
    monkeypatch.setenv("TANDEM_PORT", "x")
    with pytest.raises(ConfigError, match="TANDEM_PORT"):
        parse("up", "--port", "1")
    monkeypatch.delenv("TANDEM_PORT")
    with pytest.raises(ConfigError, match="c.yaml:1: port"):
        parse("up", "--port", "1", "--config", file("port: x\n"))


def test_service_link_of_kubernetes_is_skipped(monkeypatch, capsys):
    for name in ("TANDEM_PORT", "TANDEM_ADMIN_PORT", "TANDEM_PORT_8000_TCP"):
        monkeypatch.setenv(name, "tcp://10.96.0.7:8000")
    monkeypatch.setenv("TANDEM_SERVICE_HOST", "10.96.0.7")
    assert parse("up").port == 8000
    assert parse("gateway", "--redis-url", "redis://h").admin_port is None
    monkeypatch.setenv("TANDEM_DTYPE", "tcp://10.96.0.7:8000")
    assert main(["up", "--print-config"]) == 2
    assert "TANDEM_DTYPE" in capsys.readouterr().err  # not a name of a service link


def test_address_of_a_pod_is_not_where_a_gateway_listens(monkeypatch):
    monkeypatch.setenv("TANDEM_HOST", "10.0.0.9")
    monkeypatch.setenv("TANDEM_REDIS_URL", "redis://h")
    assert (parse("gateway").host, parse("router").host, parse("worker").host) == (
        "127.0.0.1",
        "127.0.0.1",
        "10.0.0.9",
    )


def test_misspelled_variable_suggests_its_flag(monkeypatch, capsys):
    monkeypatch.setenv("TANDEM_MAX_RUNING_REQUESTS", "4")
    with pytest.raises(SystemExit):
        main(["up", "--help"])
    assert "did you mean TANDEM_MAX_RUNNING_REQUESTS?" in capsys.readouterr().err


def test_switch_with_a_negative_form_has_one_key(file, monkeypatch):
    path = file("console: false\n")
    assert parse("up", "--config", path).console is False
    assert parse("up", "--config", path, "--console").console is True
    monkeypatch.setenv("TANDEM_CONSOLE", "true")
    assert parse("up", "--config", path).console is True


def test_several_values_are_separate_arguments_or_list(file, monkeypatch):
    assert parse("up", "--config", file("allowed-hosts: [a, b]\n")).allowed_hosts == ["a", "b"]
    assert parse("up", "--config", file("allowed-hosts: a\n")).allowed_hosts == ["a"]
    monkeypatch.setenv("TANDEM_ALLOWED_HOSTS", "c 'd'")
    assert parse("up").allowed_hosts == ["c", "d"]
    monkeypatch.setenv("TANDEM_GATEWAY", "a:1 b:2")
    assert parse("router", "--redis-url", "redis://h").gateway == ["a:1", "b:2"]
    assert parse("router", "--redis-url", "redis://h", "--gateway", "c:3").gateway == ["c:3"]


def test_children_of_a_command_do_not_read_its_variables(monkeypatch, tmp_path):
    """`tandem up` has no --drain-timeout; its gateway and workers have one, and must not take it from there."""
    monkeypatch.setattr("tandem_services.cli.up.run", lambda _: 0)
    for name, value in (("PORT", "9001"), ("DRAIN_TIMEOUT", "1"), ("REDIS_URL", "redis://h"), ("LOG_LEVEL", "error")):
        monkeypatch.setenv(f"TANDEM_{name}", value)
    monkeypatch.setenv("TANDEM_CONFIG", str(tmp_path / "c.yaml"))
    (tmp_path / "c.yaml").write_text("decode: 2\n")
    assert main(["up"]) == 0
    assert {name for name in os.environ if name.startswith("TANDEM_")} == {"TANDEM_REDIS_URL", "TANDEM_LOG_LEVEL"}


def test_every_setting_of_a_command_has_its_own_names():
    commands = next(action for action in build_parser()._actions if action.choices)
    taught = [parser for parser in commands.choices.values() if parser.sources is not None]
    assert {parser.prog for parser in taught} >= {f"tandem {name}" for name in ("up", "worker", "gateway", "router")}
    for parser in taught:
        table = settings_of(parser)
        keys = [name for setting in table for name in (setting.key, *setting.aliases)]
        assert len({*keys}) == len(keys)
        assert len({setting.variable for setting in table}) == len(table)


def made_up(**sources: bool):
    root = TeachingParser(prog="x")
    parser = root.add_subparsers(parser_class=TeachingParser).add_parser("serve")
    parser.add_argument("model", nargs="?")
    parser.add_argument("--size", default="small")
    teach(parser, common=("--size",), check=lambda _: None, sources=Sources(**sources))
    return root


def test_positional_argument_that_may_be_left_out_is_a_setting(file, monkeypatch):
    path = file("model: a\n")
    assert made_up().parse_args(["serve", "--config", path]).model == "a"
    assert made_up().parse_args(["serve", "--config", path, "b"]).model == "b"
    assert made_up().parse_args(["serve"]).model is None
    monkeypatch.setenv("TANDEM_MODEL", "c")
    assert made_up().parse_args(["serve", "--config", path]).model == "c"


def test_names_of_models_are_a_mapping_in_the_file(file):
    path = file("models:\n  small: org/a@main\n  '7': ./b\nsize: big\n")
    args = made_up(names_models=True).parse_args(["serve", "--config", path])
    assert (args.model_names, args.size) == ({"small": "org/a@main", "7": "./b"}, "big")
    with pytest.raises(ConfigError, match="c.yaml:1: models: no such setting"):
        made_up().parse_args(["serve", "--config", path])
    with pytest.raises(ConfigError, match="c.yaml:1: models: settings are flat"):
        parse("gateway", "--redis-url", "redis://h", "--config", file("models: {a: b}\n"))


@pytest.mark.parametrize("names", ["{a: {b: c}}", "{a: [b]}", "{a: true}", "{a: b, a: c}", "{[a]: b}", "{a: *b}"])
def test_names_of_models_that_are_no_text_are_refused(names, file):
    with pytest.raises(ConfigError, match="c.yaml:1"):
        made_up(names_models=True).parse_args(["serve", "--config", file(f"models: {names}")])
