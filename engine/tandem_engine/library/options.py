"""Engine options as keywords: the table of command-line flags, under the same names.

LLM(path, page_size=32, mem_fraction_static=0.5, disable_radix_cache=True)
tandem worker --page-size 32 --mem-fraction-static 0.5 --disable-radix-cache
"""

import argparse
import difflib
from pathlib import Path
from typing import NoReturn

from tandem_engine.config import EngineConfig, Role
from tandem_engine.errors import ConfigError
from tandem_engine.flags import add_engine_flags, engine_config


class _OptionParser(argparse.ArgumentParser):
    """Raises instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def config_from_options(model: str | Path, options: dict[str, object]) -> EngineConfig:
    """The configuration of an engine that serves `model`.

    Raises `ConfigError` for an option that does not exist, naming the nearest, and for a value that its flag
    would not take.
    """
    parser = _OptionParser(add_help=False, allow_abbrev=False)
    add_engine_flags(parser)
    # Names and aliases, such as vLLM's max_model_len.
    actions = {
        flag.lstrip("-").replace("-", "_"): action for action in parser._actions for flag in action.option_strings
    }
    argv: list[str] = []
    for name, value in options.items():
        if name not in actions:
            raise ConfigError(f"there is no engine option {name!r}{_nearest(name, [*actions])}")
        argv += _arguments(actions[name], value)
    args = parser.parse_args(argv)
    # It has no peers: nothing that a transfer could not do stands in its way.
    args.model, args.role, args.transport = str(model), Role.BOTH.value, "none"
    return engine_config(args)


def _arguments(action: argparse.Action, value: object) -> list[str]:
    flag = action.option_strings[0]
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ConfigError(f"{action.dest} is a switch and takes True or False, got {value!r}")
        return [flag] if value else []
    if value is None:
        return []
    if isinstance(value, bool):
        raise ConfigError(f"{action.dest} takes a value, got {value}")
    if action.nargs in ("+", "*") and isinstance(value, list | tuple):
        return [flag, *map(str, value)]
    # One word, so that a value may begin with a dash.
    return [f"{flag}={value}"]


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f": did you mean {close[0]}?" if close else f"; there are {', '.join(sorted(known))}"
