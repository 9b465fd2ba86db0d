"""What `tandem up --help-all` looks like."""

import pytest

from tandem_services.cli.main import main


def test_every_flag_is_in_a_group_that_says_what_it_is_about(capsys):
    """The system's own flags, some thirty, stood in one heap before the engine's groups."""
    with pytest.raises(SystemExit):
        main(["up", "--help-all"])
    _, _, told = capsys.readouterr().out.partition("\noptions:\n")
    ungrouped, _, groups = told.partition("\n\n")
    assert [word for word in ungrouped.split() if word.startswith("--")] == ["--help", "--help-all"]
    for title, flag in {
        "model": "--served-model-name",
        "workers": "--decode",
        "API": "--api-keys",
        "routing": "--router-policy",
        "Redis": "--redis-url",
        "start": "--run-dir",
        "logs and traces": "--log-format",
        "scheduler": "--max-running-requests",
    }.items():
        _, _, group = f"\n{groups}".partition(f"\n{title}:\n")
        assert flag in group.partition("\n\n")[0], title
