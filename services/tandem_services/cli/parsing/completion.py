"""`tandem completion`: a script that completes commands, flags and choices in a shell, made from the parsers.

The script of zsh is that of bash, by zsh's `bashcompinit`. A value without choices is completed as the name of a file.
"""

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass

SHELLS = ("bash", "zsh", "fish")

EXAMPLES = """\
examples:
  source <(tandem completion bash)                                        in this shell
  tandem completion bash >~/.local/share/bash-completion/completions/tandem
  source <(tandem completion zsh)                                         after compinit, in ~/.zshrc
  tandem completion fish >~/.config/fish/completions/tandem.fish
"""

_WORD = re.compile(r"[\w.:@/+-]+")
"""A choice that needs no quotes in any of the shells."""

_SENTENCE_END = re.compile(r"[.;:(]")
_MAX_DESCRIPTION = 70


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "completion",
        help="print a script for completion in bash, zsh or fish",
        description="Print a script that completes commands, flags and their choices.",
        epilog=EXAMPLES,
    )
    parser.add_argument("shell", choices=SHELLS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    print(completion_script(args.root, args.shell), end="")
    return 0


def completion_script(root: argparse.ArgumentParser, shell: str) -> str:
    """For one of `SHELLS`, of the command `root`."""
    commands = [*_commands(root, (root.prog,), "")]
    if shell == "fish":
        return "\n".join(_fish(root.prog, commands)) + "\n"
    head = "autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    return head + _bash(root.prog, commands)


@dataclass(frozen=True, slots=True)
class _Command:
    words: tuple[str, ...]
    help: str
    flags: tuple[argparse.Action, ...]
    operands: tuple[str, ...]
    """Choices of its arguments, where they have some."""
    subcommands: tuple[str, ...]


def _commands(parser: argparse.ArgumentParser, words: tuple[str, ...], text: str) -> Iterator[_Command]:
    """A command, then those below it."""
    nested: list[tuple[str, str, argparse.ArgumentParser]] = []
    operands: list[str] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {each.dest: each.help or "" for each in action._choices_actions}
            nested += [(name, helps.get(name, ""), below) for name, below in action.choices.items()]
        elif not action.option_strings:
            operands += _choices(action)
    flags = [action for action in parser._actions if action.option_strings and action.help != argparse.SUPPRESS]
    yield _Command(words, text, tuple(flags), tuple(operands), tuple(name for name, _, _ in nested))
    for name, about, below in nested:
        yield from _commands(below, (*words, name), about)


def _choices(action: argparse.Action) -> list[str]:
    return [str(choice) for choice in action.choices or () if _WORD.fullmatch(str(choice))]


_BASH = """\
# completion of {prog}: `{prog} completion bash` prints it
_{name}() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} command={prog} words= i
  # --flag=value is three words.
  if [ "$word" = = ]; then
    word=
  elif [ "$previous" = = ]; then
    previous=${{COMP_WORDS[COMP_CWORD-2]}}
  fi
  for ((i = 1; i < COMP_CWORD; i++)); do
    case "$command ${{COMP_WORDS[i]}}" in
      {commands}) command="$command ${{COMP_WORDS[i]}}" ;;
    esac
  done
  case "$command $previous" in
{values}
  esac
  case "$command" in
{words}
  esac
  # Before the two blanks: what is no flag.
  if [ "${{word#-}}" = "$word" ] && [ -n "${{words%%  *}}" ]; then
    words=${{words%%  *}}
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o bashdefault -o default -F _{name} {prog}
"""


def _bash(prog: str, commands: list[_Command]) -> str:
    paths = [" ".join(command.words) for command in commands]
    values = [line for command, path in zip(commands, paths, strict=True) for line in _bash_values(command, path)]
    words = [
        f'    "{path}") words="{" ".join((*command.subcommands, *command.operands))}  {" ".join(_names(command))}" ;;'
        for command, path in zip(commands, paths, strict=True)
    ]
    return _BASH.format(
        prog=prog,
        name=prog.replace("-", "_"),
        commands="|".join(f'"{path}"' for path in paths[1:]),
        values="\n".join(values),
        words="\n".join(words),
    )


def _bash_values(command: _Command, path: str) -> Iterator[str]:
    """What follows flags that take a value: choices, or the name of a file."""
    files: list[str] = []
    for action in command.flags:
        patterns = [f'"{path} {option}"' for option in action.option_strings]
        if choices := _choices(action):
            reply = f'COMPREPLY=($(compgen -W "{" ".join(choices)}" -- "$word"))'
            yield f"    {'|'.join(patterns)}) {reply}; return ;;"
        elif action.nargs not in (0, argparse.OPTIONAL):
            files += patterns
    if files:
        yield f"    {'|'.join(files)}) COMPREPLY=(); return ;;"


def _names(command: _Command) -> list[str]:
    return [option for action in command.flags for option in action.option_strings]


def _fish(prog: str, commands: list[_Command]) -> Iterator[str]:
    yield f"# completion of {prog}: `{prog} completion fish` prints it"
    yield f"complete -c {prog} -f"
    for command in commands:
        seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in command.words[1:])
        if command.subcommands:
            others = f"not __fish_seen_subcommand_from {' '.join(command.subcommands)}"
            condition = f"{seen}; and {others}" if seen else others
            for below in commands:
                if below.words[:-1] == command.words:
                    yield f"complete -c {prog} -n '{condition}' -a {below.words[-1]} -d {_quoted(below.help)}"
        condition = seen or "__fish_use_subcommand"
        if command.operands:
            yield f"complete -c {prog} -n '{condition}' -a '{' '.join(command.operands)}'"
        yield from (f"complete -c {prog} -n '{condition}' {_fish_flag(action)}" for action in command.flags)


def _fish_flag(action: argparse.Action) -> str:
    names = [f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}" for option in action.option_strings]
    choices = _choices(action)
    if choices:
        names.append(f"-x -a '{' '.join(choices)}'")
    elif action.nargs not in (0, argparse.OPTIONAL):
        names.append("-r -F")
    text = argparse.HelpFormatter("")._expand_help(action) if action.help else ""
    return f"{' '.join(names)} -d {_quoted(text)}"


def _quoted(text: str) -> str:
    """The first clause of a text, for fish."""
    clause = _SENTENCE_END.split(text)[0].strip()[:_MAX_DESCRIPTION]
    escaped = clause.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
