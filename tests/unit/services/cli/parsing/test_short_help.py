"""`--help` is a page; `--help-all` has every flag; `--help=WORD` what there is about a word."""

import argparse
import os
import re
import subprocess
import sys

import pytest

from tandem_services.cli.main import build_parser, main
from tandem_testing.import_blocker import write_import_blocker

COMMANDS = ("up", "worker", "gateway", "router")
MAX_LINES = 40


@pytest.fixture(autouse=True)
def _terminal_of_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")


@pytest.fixture
def helped(capsys):
    """A function that runs a command that shows help, and returns what it shows."""

    def run(*argv: str) -> str:
        with pytest.raises(SystemExit) as stopped:
            main([*argv])
        assert stopped.value.code == 0
        return capsys.readouterr().out

    return run


def flags_of(command: str) -> list[argparse.Action]:
    commands = next(each for each in build_parser()._actions if isinstance(each, argparse._SubParsersAction))
    actions = commands.choices[command]._actions
    return [action for action in actions if action.option_strings and action.help != argparse.SUPPRESS]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_a_page_with_common_flags_and_examples(command, helped):
    text = helped(command, "--help")
    assert len(text.splitlines()) <= MAX_LINES
    assert text.startswith(f"usage: tandem {command} [FLAG ...]\n")
    for part in ("common flags:\n  --model ", "examples:\n  tandem ", f"tandem {command} --help-all "):
        assert part in text
    assert f"all {len(flags_of(command))} flags" in text
    assert 10 <= len(re.findall(r"^  --", text, re.MULTILINE)) <= 16


@pytest.mark.parametrize("command", COMMANDS)
def test_help_all_has_every_flag_in_a_group(command, helped):
    text = helped(command, "--help-all")
    assert all(option in text for action in flags_of(command) for option in action.option_strings)
    _, _, rest = text.partition("\noptions:\n")
    ungrouped, _, _ = rest.partition("\n\n")
    assert [word for word in ungrouped.split() if word.startswith("--")] == ["--help", "--help-all"]


def test_help_is_found_by_group_flag_or_word(helped):
    assert helped("up", "--help=workers").splitlines()[0] == "workers:"
    assert helped("up", "--help", "KV transfer").splitlines()[0] == "KV transfer:"
    for name in ("--max-model-len", "max-model-len", "max_model_len", "--context-length"):
        text = helped("up", f"--help={name}")
        assert "--context-length N, --max-model-len N" in text
        assert text.endswith("  environment: TANDEM_CONTEXT_LENGTH   in a file: context-length\n")
    assert "--session-ttl S" in (text := helped("up", "--help=session"))
    assert "--port" not in text
    assert helped("--help=up") == helped("up", "--help")


def test_help_about_a_flag_of_another_engine_is_its_hint(helped):
    assert helped("up", "--help=enforce-eager") == "--enforce-eager of vLLM or SGLang is --disable-cuda-graph here\n"


@pytest.mark.parametrize("word", ["nosuchword", "force-fault-every"])
def test_help_about_nothing_is_wrong_usage(word, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["up", f"--help={word}"])
    assert stopped.value.code == 2
    assert f"--help={word}: no flag or group of flags is about this" in capsys.readouterr().err


def test_command_without_settings_has_its_whole_help(helped):
    assert "--max-tokens" in helped("chat", "--help")


def test_help_needs_no_yaml_and_no_torch(tmp_path):
    folder = write_import_blocker(tmp_path, "yaml", "torch", "numpy")
    code = "from tandem_services.cli.start import tandem; raise SystemExit(tandem())"
    done = subprocess.run(
        [sys.executable, "-c", code, "up", "--help"],
        env=os.environ | {"PYTHONPATH": ":".join([str(folder), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
