"""`--print-config`: the settings in force as a file that `--config` reads, each with its origin."""

import argparse
import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from tandem_services.cli.parsing.flag_table import Resolved, Setting, masked, without_login
from tandem_services.cli.parsing.settings_file import MODELS

_PLAIN = re.compile(r"(?!(true|false|null)$)[A-Za-z_./][\w./+-]*|(0|[1-9]\d*)(\.\d+)?", re.ASCII)
"""Text that is itself in every YAML reader; other text gets quotes."""

_AMBIGUOUS = frozenset(("y", "n", "yes", "no", "on", "off"))


def config_text(prog: str, settings: Sequence[Resolved], model_names: Mapping[str, str]) -> str:
    """One line per setting, and the file's names of models."""
    rows = [(f"{one.setting.key}: {_shown(one.setting, one.value)}", one.origin) for one in settings]
    if model_names:
        names = (f"{_scalar(name)}: {_scalar(without_login(model))}" for name, model in model_names.items())
        rows.append((f"{MODELS}: {{{', '.join(names)}}}", "file"))
    width = min(max((len(line) for line, _ in rows), default=0), 60)
    lines = (f"{line:<{width}}  # {_one_line(origin)}" for line, origin in rows)
    return "\n".join((f"# settings of `{prog}`, and where each comes from", *lines, ""))


def _shown(setting: Setting, value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(_scalar(masked(setting, str(item))) for item in value)}]"
    return _scalar(masked(setting, str(value)))


def _scalar(text: str) -> str:
    if _PLAIN.fullmatch(text) and text.lower() not in _AMBIGUOUS:
        return text
    quoted: str = yaml.safe_dump(text, default_style='"', width=1 << 30)
    return quoted.rstrip("\n")


def _one_line(origin: str) -> str:
    """The name of a file may hold anything, also the end of a comment."""
    return "".join(letter if letter.isprintable() else "?" for letter in origin)


def print_config(parser: argparse.ArgumentParser, settings: Sequence[Resolved], model_names: Mapping[str, str]) -> None:
    print(config_text(parser.prog, settings, model_names), end="")
