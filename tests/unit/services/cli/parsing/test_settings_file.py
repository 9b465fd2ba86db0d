"""What a file of settings may hold."""

import io
import re
from contextlib import redirect_stderr, redirect_stdout

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_engine.base.errors import ConfigError
from tandem_services.cli.entry import TeachingParser, run_command
from tandem_services.cli.parsing.settings_file import MAX_BYTES, read_entries
from tandem_services.cli.up import add_parser


@pytest.fixture(scope="module")
def up():
    """A parser with the one command."""
    parser = TeachingParser(prog="tandem")
    add_parser(parser.add_subparsers(parser_class=TeachingParser))
    return parser


@pytest.fixture
def refused(up, tmp_path):
    """A function that gives a file to `tandem up` and returns the error."""

    def error(data: str | bytes) -> str:
        path = tmp_path / "c.yaml"
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
        with pytest.raises(ConfigError) as raised:
            up.parse_args(["up", "--config", str(path)])
        return str(raised.value).replace(str(tmp_path), "")

    return error


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "# a\n\nport: 1\nmax-running-request: 4",
            "/c.yaml:4: max-running-request: no such setting (did you mean max-running-requests?)",
        ),
        ("zzzz: 1", "/c.yaml:1: zzzz: no such setting"),
        ("force-fault-every: 1", "/c.yaml:1: force-fault-every: no such setting"),
        ("config: other.yaml", "/c.yaml:1: config: no such setting"),
        ("print-config: true", "/c.yaml:1: print-config: no such setting"),
        ("port: 1\nport: 2", "/c.yaml:2: port: given twice, first in line 1"),
        ("- port", "/c.yaml:1: must be a mapping of settings: lines such as `port: 8000`"),
        ("port", "/c.yaml:1: must be a mapping of settings: lines such as `port: 8000`"),
        ("port: {a: 1}", "/c.yaml:1: port: settings are flat: a value or a list of values, no mapping"),
        ("port: [1, 2]", "/c.yaml:1: port: takes one value, got a list"),
        ("allowed-hosts:\n- a\n- [b]", "/c.yaml:3: allowed-hosts: a list has only text and numbers"),
        ("cuda-graph-bs: [1, true]", "/c.yaml:1: cuda-graph-bs: a list has only text and numbers"),
        ("port:", '/c.yaml:1: port: no value; write null for none, or "" for empty text'),
        ("port: null", "/c.yaml:1: port: null is no value of it; leave the line out for the default"),
        ("[1]: 2", "/c.yaml:1: a key must be the name of a setting"),
        ("port: 1\n---\nport: 2", "/c.yaml:2: a second document: one file has one mapping"),
        ("port: &a 1", "/c.yaml:1: anchors, aliases and tags of YAML have no meaning here: write values"),
        ("port: !!int 1", "/c.yaml:1: anchors, aliases and tags of YAML have no meaning here: write values"),
        ("model: !!python/object/apply:os.system [x]", "/c.yaml:1: anchors, aliases and tags of YAML"),
        ("<<: *a", "/c.yaml:1: anchors, aliases and tags of YAML"),
        ("a: 'b", "/c.yaml:1: not YAML: found unexpected end of stream"),
        ("a: b: c", "/c.yaml:1: not YAML: mapping values are not allowed here"),
        ('model: "\\e[31m"', "/c.yaml:1: model: has a character that cannot be printed"),
        (b"port: 1\nmodel: \xff", "/c.yaml:2: not UTF-8"),
        (b"port: \x00", "/c.yaml: not YAML"),
    ],
)
def test_file_that_is_no_flat_mapping_is_refused_with_its_line(text, sentence, refused):
    assert sentence in refused(text)


@pytest.mark.parametrize(
    ("path", "what"), [("none.yaml", "No such file"), (".", "Is a directory"), ("a\0b", "null byte")]
)
def test_file_that_cannot_be_read_is_named(path, what, up, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"--config .*: cannot be read: .*{what}"):
        up.parse_args(["up", "--config", path])


VALUES = [
    # A whole number, a number, a switch, a choice, text.
    ("port", "8080", 8080),
    ("port", '"8080"', 8080),
    ("port", "0x10", "must be a whole number, got '0x10'"),
    ("port", "0o17", "must be a whole number, got '0o17'"),
    ("port", "010", "010 may be octal"),
    ("port", '"010"', 10),
    ("port", "1_000", "must be a whole number, got '1_000'"),
    ("port", "1e3", "must be a whole number, got '1e3'"),
    ("port", "8.0", "must be a whole number, got '8.0'"),
    ("port", "08:00", "must be a whole number, got '08:00'"),
    ("port", "1:30", "must be a whole number, got '1:30'"),
    ("port", "2026-01-01", "must be a whole number, got '2026-01-01'"),
    ("port", "true", "takes a value, got true"),
    ("stall-timeout", "1e3", 1000.0),
    ("stall-timeout", "90", 90.0),
    ("stall-timeout", "1:30", "must be a number, got '1:30'"),
    ("stall-timeout", ".inf", "must be a number, got '.inf'"),
    ("context-length", "32k", 32_000),
    ("context-length", "32Ki", 32_768),
    ("kv-cache-gib", "512MiB", 0.5),
    ("disable-radix-cache", "true", True),
    ("disable-radix-cache", "false", False),
    ("disable-radix-cache", "yes", "must be true or false, got 'yes'"),
    ("disable-radix-cache", "on", "must be true or false, got 'on'"),
    ("disable-radix-cache", "True", "must be true or false, got 'True'"),
    ("disable-radix-cache", "1", "must be true or false, got '1'"),
    ("disable-radix-cache", '"true"', "must be true or false, got 'true'"),
    ("console", "null", None),
    ("dtype", "float32", "float32"),
    ("dtype", "no", "invalid choice: 'no'"),
    ("transport", "none", "none"),
    ("cluster", "no", "no"),
    ("cluster", "0x10", "0x10"),
    ("cluster", "08:00", "08:00"),
    ("cluster", "1e3", "1e3"),
    ("cluster", "2026-01-01", "2026-01-01"),
    ("cluster", "~x", "~x"),
    ("cluster", "true", "takes a value, got true"),
    ("cluster", '"true"', "true"),
    ("redis-url", "null", None),
    ("peer-group", '""', ""),
]


@pytest.mark.parametrize(("key", "text", "expected"), VALUES, ids=[f"{key}={text}" for key, text, _ in VALUES])
def test_value_is_read_by_the_type_of_its_flag(key, text, expected, up, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(f"{key}: {text}\n")
    if isinstance(expected, str) and " " in expected:
        with pytest.raises(ConfigError, match=re.escape(f"c.yaml:1: {key}: {expected}")):
            up.parse_args(["up", "--config", str(path)])
    else:
        value = getattr(up.parse_args(["up", "--config", str(path)]), key.replace("-", "_"))
        assert (value, type(value)) == (expected, type(expected))


def test_file_of_more_than_a_mebibyte_is_refused(refused):
    assert refused("#" * (MAX_BYTES + 1)) == "--config /c.yaml: more than 1 MiB, which is no file of settings"


def test_empty_file_has_no_settings(tmp_path):
    path = tmp_path / "c.yaml"
    for text in ("", "\n", "# comment\n", "---\n", "\ufeff", "{}"):
        path.write_text(text)
        assert read_entries(path) == []


KEYS = ("port", "model", "dtype", "cluster", "console", "allowed-hosts", "kv-cache-gib", "max-model-len", "models")
ODD = ("true", "null", "", "8000", "010", "1e3", "no", "~", "08:00", "&a 1", "*a", "!!int 1", "|", ">-", "? a")
ODD_LINES = ("---", "...", "- a", "  b: c", "%YAML 1.1", "[" * 50, "{" * 50, "# c", "\t")
SCALARS = st.one_of(st.sampled_from(ODD), st.text(max_size=12))
LINES = st.one_of(
    st.tuples(st.sampled_from(KEYS), SCALARS).map(": ".join),
    st.lists(SCALARS, max_size=3).map(lambda items: f"allowed-hosts: [{', '.join(items)}]"),
    st.text(max_size=20),
    st.sampled_from(ODD_LINES),
)
TEXTS = st.lists(LINES, max_size=6).map(lambda lines: "\n".join(lines).encode("utf-8", "surrogatepass"))


@settings(max_examples=150)
@given(st.one_of(TEXTS, st.binary(max_size=60)))
def test_random_file_ends_in_status_0_or_one_sentence(up, tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "random.yaml"
    path.write_bytes(data)
    out_stream, err_stream = io.StringIO(), io.StringIO()
    with redirect_stdout(out_stream), redirect_stderr(err_stream):
        status = run_command(lambda: up, ["up", "--config", str(path), "--print-config"])
    out, err = out_stream.getvalue(), err_stream.getvalue()
    assert status in (0, 2)
    assert (out.count("\n") > 50, err.count("\n")) == ((True, 0) if status == 0 else (False, 1))
    assert all(line.isprintable() for line in f"{out}{err}".split("\n"))
