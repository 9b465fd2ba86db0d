"""The hint after an argument error: what the parser that failed has under a near name, or another engine's flag here.

A hint names only flags and words of that parser. There is none where no name is near, and where the flag means
something elsewhere: in another engine, or in an engine's own flags that this command does not have.
"""

import argparse
import difflib
import re
from collections.abc import Sequence

from tandem_engine.config.flags import about_other_engine, engine_flags

_CUTOFF = 0.75

_UNRECOGNIZED = "unrecognized arguments: "
_INVALID_CHOICE = re.compile(r"argument (?P<name>.+?): invalid choice: '(?P<word>.*?)' ")


def hint_for(parser: argparse.ArgumentParser, message: str, *, serves: bool) -> str:
    """What follows argparse's `message`; "" without a hint. `serves`: see `about_flag`."""
    if message.startswith(_UNRECOGNIZED):
        flags = [*parser._option_string_actions]
        words = message.removeprefix(_UNRECOGNIZED).split()
        given = [word.partition("=")[0] for word in words if word.startswith("-")]
        hints = (_operand(parser, flag) or about_flag(flag, flags, serves=serves) for flag in given)
        return next((hint for hint in hints if hint), "")
    choice = _INVALID_CHOICE.match(message)
    if choice is not None:
        return did_you_mean(choice["word"], _choices(parser, choice["name"]))
    return ""


def _operand(parser: argparse.ArgumentParser, flag: str) -> str:
    """For an argument that has no flag here."""
    names = {f"--{action.dest}": action.metavar for action in parser._actions if not action.option_strings}
    return f" ({names[flag]} stands without a flag)" if flag in names else ""


def about_flag(flag: str, flags: Sequence[str], *, serves: bool) -> str:
    """In brackets, for a flag that is none of `flags`.

    `serves`: the command does what a server of vLLM or SGLang does, so that their flags may be meant.
    """
    if flag in engine_flags():
        return ""
    theirs = about_other_engine(flag, flags)
    if theirs is not None:
        return f" ({theirs})" if theirs and serves else ""
    return did_you_mean(flag, flags)


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """The nearest of `known`, in brackets; "" when none is near."""
    # Without the dashes, which would make short names similar.
    bare = {name.lstrip("-"): name for name in known}
    near = difflib.get_close_matches(word[:80].lstrip("-"), bare, n=1, cutoff=_CUTOFF)
    return f" (did you mean {bare[near[0]]}?)" if near else ""


def _choices(parser: argparse.ArgumentParser, name: str) -> list[str]:
    for action in parser._actions:
        if argparse._get_action_name(action) == name:
            return [choice for choice in (action.choices or ()) if isinstance(choice, str)]
    return []
