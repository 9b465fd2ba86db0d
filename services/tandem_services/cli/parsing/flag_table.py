"""One table of a command's settings, derived from its parser: flag, environment variable, key of a file.

    flag  >  TANDEM_<DEST>  >  file of --config or TANDEM_CONFIG  >  default

The command line is parsed first, with a mark in place of each default, so that what was given is known. What was not
comes from the environment and the file, through the flag's own type. Hidden flags are no settings. A positional
argument is one where the command line may leave it out.
"""

import argparse
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem_engine.base.errors import ConfigError
from tandem_services.cli.parsing.entries import Entry, require_plain_text
from tandem_services.cli.parsing.hints import did_you_mean
from tandem_services.common.settings import CONFIG_VARIABLE, PREFIX, SWITCH_WORDS, flag_variables

CONFIG, PRINT_CONFIG, DRY_RUN, CHECK_ARGS = "config", "print_config", "dry_run", "check_args"

MASK = "***"
"""What `--print-config` shows of a secret."""

_OTHER_VARIABLES = {"otlp_traces_endpoint": "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT"}
"""Settings whose default is taken from variables of a standard: it is None without them."""

_SECRET_NAMES = ("api_key", "password", "token", "secret")
_LOGIN = re.compile(r"(?P<before>\b[a-zA-Z][\w+.-]*://)(?:(?P<user>[^\s/@:]*)(?P<colon>:))?\S*@")
_SECRET_PARAMETER = re.compile(r"([?&](?:[\w-]*(?:password|token|secret|key))=)[^&\s#]+", re.IGNORECASE)
_MASKED = re.compile(r"://\S*\*\*\*@|[?&][^=&\s]+=\*\*\*")

Known = tuple[argparse.Namespace, list[str]]


class _NotGiven:
    """In a namespace: the command line has nothing for this flag."""

    def __copy__(self) -> list[str]:
        """What `append` starts from; argparse copies what it finds."""
        return []


NOT_GIVEN = _NotGiven()


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One row: a flag under its three names."""

    action: argparse.Action
    key: str
    aliases: tuple[str, ...]
    """Further keys: the flag's other names."""
    variable: str

    @property
    def switch(self) -> bool:
        return self.action.nargs == 0

    @property
    def many(self) -> bool:
        """It takes several values."""
        return self.action.nargs in ("+", "*") or isinstance(self.action, argparse._AppendAction)


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """The value in force of one setting."""

    setting: Setting
    value: Any
    origin: str
    """flag, environment NAME, FILE:LINE or default"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sources:
    """What besides the command line sets the flags of one command."""

    not_variables: frozenset[str] = frozenset()
    """Variables that mean something else where this command runs."""
    names_models: bool = False
    """A file may have `models`: names of models, in `args.model_names`."""


def settings_of(parser: argparse.ArgumentParser) -> tuple[Setting, ...]:
    """The table of one command."""
    return tuple(_setting(action) for action in parser._actions if _is_setting(action))


def _is_setting(action: argparse.Action) -> bool:
    return (
        bool(action.option_strings or action.nargs == argparse.OPTIONAL)
        and action.help != argparse.SUPPRESS
        and action.dest not in (CONFIG, PRINT_CONFIG, DRY_RUN, CHECK_ARGS)
        and not isinstance(action, argparse._HelpAction | argparse._VersionAction | argparse._SubParsersAction)
    )


def _setting(action: argparse.Action) -> Setting:
    names = [option[2:] for option in action.option_strings if option.startswith("--")] or [action.dest]
    if isinstance(action, argparse.BooleanOptionalAction):
        names = [name for name in names if not name.startswith("no-")]
    return Setting(action=action, key=names[0], aliases=tuple(names[1:]), variable=f"{PREFIX}{action.dest.upper()}")


def add_settings_flags(parser: argparse.ArgumentParser, *, plans: bool, checks_flags: bool) -> None:
    """--config and --print-config; --dry-run for a command that `plans`, --check-args for one that `checks_flags`."""
    group = parser.add_argument_group("settings")
    group.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="YAML file of settings: flags without their dashes. Flags win, then variables TANDEM_<NAME>, then the "
        "file (docs/settings.md, TANDEM_CONFIG; default: none)",
    )
    group.add_argument(
        "--print-config",
        action="store_true",
        help="check and print all settings as such a file, each with its origin, and start nothing",
    )
    if checks_flags:
        group.add_argument(
            "--check-args",
            action="store_true",
            help="check all flags without reading a model or another file, and start nothing; status 2 for a wrong one",
        )
    if plans:
        group.add_argument(
            "--dry-run", action="store_true", help="check everything, print what would be started, and start nothing"
        )


def parse_with_settings(
    parser: argparse.ArgumentParser,
    parse: Callable[[argparse.Namespace], Known],
    namespace: argparse.Namespace,
    sources: Sources,
) -> Known:
    """What `parse` makes of the command line, completed by environment, file and defaults; `args.settings` has origins.

    Raises `ConfigError` with the name of the variable, or file and line, for a value that the flag would not take.
    """
    table = settings_of(parser)
    required = [setting.action for setting in table if setting.action.required]
    with _marked(table):
        for setting in table:
            setattr(namespace, setting.action.dest, NOT_GIVEN)
        args, unknown = parse(namespace)
    environment = flag_variables()
    given = {name: text for name, text in environment.items() if name not in sources.not_variables}
    path = args.config or (Path(environment[CONFIG_VARIABLE]) if CONFIG_VARIABLE in environment else None)
    read = [] if path is None else _read(path.expanduser())
    args.model_names = {}
    if sources.names_models:
        args.model_names, read = _model_names(read)
    entries = _by_setting(table, read)
    args.settings = tuple(_resolve(parser, setting, args, given, entries.get(setting.key)) for setting in table)
    for one in args.settings:
        setattr(args, one.setting.action.dest, one.value)
    missing = [action for action in required if getattr(args, action.dest) is None]
    if missing:
        parser.error(f"the following arguments are required: {', '.join('/'.join(a.option_strings) for a in missing)}")
    if not args.print_config:
        _refuse_masks(args.settings)
    return args, unknown


@contextmanager
def _marked(table: Sequence[Setting]) -> Iterator[None]:
    """Within it the command line may leave out each setting, and argparse puts no default in its place."""
    saved = [(setting.action, setting.action.required, setting.action.default) for setting in table]
    for action, _, _ in saved:
        if action.option_strings:
            action.required = False
        else:
            action.default = NOT_GIVEN
    try:
        yield
    finally:
        for action, required, default in saved:
            action.required, action.default = required, default


def _model_names(entries: Sequence[Entry]) -> tuple[dict[str, str], list[Entry]]:
    """The file's models by name, and its other entries."""
    names = next((entry.value for entry in entries if isinstance(entry.value, dict)), {})
    return names, [entry for entry in entries if not isinstance(entry.value, dict)]


def _read(path: Path) -> list[Entry]:
    from tandem_services.cli.parsing.settings_file import read_entries  # `--help` needs no YAML

    return read_entries(path)


def _by_setting(table: Sequence[Setting], entries: Sequence[Entry]) -> dict[str, Entry]:
    """The file's entries by the setting's own key. Raises `ConfigError` for keys that name no setting, or one twice."""
    own = {name: setting.key for setting in table for name in (setting.key, *setting.aliases)}
    found: dict[str, Entry] = {}
    for entry in entries:
        if entry.key not in own:
            raise ConfigError(f"{entry.place}: {entry.key[:80]}: no such setting{did_you_mean(entry.key, [*own])}")
        key = own[entry.key]
        if key in found:
            raise ConfigError(f"{entry.place}: {entry.key}: the same setting as {found[key].key}: {found[key].place}")
        found[key] = entry
    return found


def _resolve(
    parser: argparse.ArgumentParser,
    setting: Setting,
    args: argparse.Namespace,
    environment: Mapping[str, str],
    entry: Entry | None,
) -> Resolved:
    # All that is given is checked, also what something else overrides: it is wrong on another day.
    text = environment.get(setting.variable)
    from_file = None if entry is None else _entry_value(parser, setting, entry, set_elsewhere=text is not None)
    from_environment = None if text is None else _variable_value(parser, setting, text)
    given, default = getattr(args, setting.action.dest), setting.action.default
    if given is not NOT_GIVEN:
        return Resolved(setting=setting, value=given, origin="flag")
    if text is not None:
        return Resolved(setting=setting, value=from_environment, origin=f"environment {setting.variable}")
    standard = _OTHER_VARIABLES.get(setting.action.dest)
    if standard is not None and default is not None:
        return Resolved(setting=setting, value=default, origin=f"environment {standard}")
    if entry is not None:
        return Resolved(setting=setting, value=from_file, origin=entry.place)
    if isinstance(default, str):
        default = parser._get_value(setting.action, default)
    return Resolved(setting=setting, value=default, origin="default")


def _entry_value(parser: argparse.ArgumentParser, setting: Setting, entry: Entry, *, set_elsewhere: bool) -> Any:
    """`set_elsewhere`: the default may be what the environment has."""
    place = f"{entry.place}: {entry.key}"
    value, default = entry.value, setting.action.default
    if value is None:
        if default is not None and not set_elsewhere and setting.action.dest not in _OTHER_VARIABLES:
            raise ConfigError(f"{place}: null is no value of it; leave the line out for the default")
        return None
    if setting.switch:
        if not isinstance(value, bool):
            raise ConfigError(f"{place}: must be true or false, got {' '.join(value)[:80]!r}")
        return value
    if isinstance(value, dict):
        raise ConfigError(f"{place}: settings are flat: a value or a list of values, no mapping")
    if isinstance(value, bool):
        word = str(value).lower()
        raise ConfigError(f'{place}: takes a value, got {word}; write "{word}" if it is text')
    if entry.listed and not setting.many:
        raise ConfigError(f"{place}: takes one value, got a list")
    if not value and default not in (None, []):
        raise ConfigError(f"{place}: takes at least one value")
    return _converted(parser, setting, value, place)


def _variable_value(parser: argparse.ArgumentParser, setting: Setting, text: str) -> Any:
    place = setting.variable
    require_plain_text(text, place)
    if setting.switch:
        if text not in SWITCH_WORDS:
            raise ConfigError(f"{place}: must be true or false, got {text[:80]!r}")
        return SWITCH_WORDS[text]
    words = [text]
    if setting.many:
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise ConfigError(f"{place}: its words cannot be separated: {error}") from error
    return _converted(parser, setting, words, place)


def _converted(parser: argparse.ArgumentParser, setting: Setting, words: Sequence[str], place: str) -> Any:
    """As the flag reads them. Raises `ConfigError`."""
    default = setting.action.default
    if not isinstance(default, list | None) and list(words) == [str(default)]:
        return default  # also where a flag's type refuses it: 0 for a limit that is off
    try:
        values = [parser._get_value(setting.action, word) for word in words]
        for value in values:
            parser._check_value(setting.action, value)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{place}: {error.message}") from error
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from error
    return values if setting.many else values[0]


def masked(setting: Setting, text: str) -> str:
    """`text` without passwords: of URLs, in their parameters, or all of it where the setting is a secret."""
    if setting.action.dest.endswith(_SECRET_NAMES):
        return MASK
    return without_login(text)


def without_login(text: str) -> str:
    """`text` without passwords of URLs."""
    text = _LOGIN.sub(lambda m: f"{m['before']}{m['user'] or ''}{m['colon'] or ''}{MASK}@", text)
    return _SECRET_PARAMETER.sub(rf"\g<1>{MASK}", text)


def _refuse_masks(resolved: Sequence[Resolved]) -> None:
    for one in resolved:
        if isinstance(one.value, str) and _MASKED.search(one.value):
            raise ConfigError(
                f"{one.origin}: {one.setting.key}: {MASK} stands for a secret that --print-config does not show; "
                "write the secret, or name a file that has it"
            )
