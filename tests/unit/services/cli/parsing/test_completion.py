"""`tandem completion`: what a shell offers."""

import re
import shutil
import subprocess

import pytest

from tandem_services.cli.main import build_parser, main
from tandem_services.cli.parsing.completion import completion_script

OFFER = """
source "$1"
shift
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
_tandem
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def offered(tmp_path_factory):
    """A function that returns what bash offers for the last of some words."""
    script = tmp_path_factory.mktemp("completion") / "tandem.bash"
    script.write_text(completion_script(build_parser(), "bash"))

    def offer(*words: str) -> list[str]:
        command = ["bash", "--norc", "-uc", OFFER, "bash", str(script), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()

    return offer


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["tandem", "wo"], ["worker"]),
        (["tandem", "bench", ""], ["serve", "offline"]),
        (["tandem", "completion", ""], ["bash", "zsh", "fish"]),
        (["tandem", "up", "--max-model"], ["--max-model-len"]),
        (["tandem", "up", "--dtype", ""], ["auto", "float32", "bfloat16"]),
        (["tandem", "up", "--dtype", "=", "b"], ["bfloat16"]),
        (["tandem", "up", "--dtype", "="], ["auto", "float32", "bfloat16"]),
        (["tandem", "up", "--dtype", "float32", "--log-format", "j"], ["json"]),
        # bash offers files.
        (["tandem", "up", "--model", ""], []),
        (["tandem", "up", "--force-fault"], []),
        (["tandem", "nosuchcommand", "--dt"], []),
        (["tandem", "bench", "serve", "--num-p"], ["--num-prompts"]),
    ],
)
def test_bash_offers_matching_completions(words, expected, offered):
    assert offered(*words) == expected


def test_bash_offers_flags_where_no_value_is_expected(offered):
    assert {"--model", "--port", "--print-config"} <= {*offered("tandem", "up", "")}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_script_of_each_shell_has_every_flag(shell, capsys):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert script.isascii()
    assert ("bashcompinit" in script) == (shell == "zsh")
    for option in ("--max-num-seqs", "--print-config", "--grpc-port", "--no-console"):
        assert re.search(rf"-l {option[2:]}\b" if shell == "fish" else rf"{option}\b", script), option


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shell_reads_its_script(shell, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    path = tmp_path / "script"
    path.write_text(completion_script(build_parser(), shell))
    subprocess.run([shell, "-n", str(path)], check=True)


def test_shell_that_is_none_is_wrong_usage(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["completion", "tcsh"])
    assert stopped.value.code == 2
    assert "invalid choice: 'tcsh'" in capsys.readouterr().err
