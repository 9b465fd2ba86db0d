"""Parsed flags as arguments again, for a child process that uses the same table."""

import argparse
from collections.abc import Callable


def given_again(args: argparse.Namespace, add_flags: Callable[[argparse.ArgumentParser], None]) -> list[str]:
    """Arguments by which a parser with `add_flags` comes to what `args` has of it. Defaults are left out."""
    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser)
    argv: list[str] = []
    for action in parser._actions:
        value = getattr(args, action.dest)
        if value == action.default:
            continue
        argv.append(action.option_strings[0])
        if isinstance(value, list):
            argv += map(str, value)
        elif action.nargs != 0:
            argv.append(str(value))
    return argv
