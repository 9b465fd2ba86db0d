"""Prints settings for uv, as assignments of a shell, so that it asks the same package indexes as pip on this machine.

    PIP config list | python tools/uv_settings.py

uv does not read pip's files and variables. What pip is set to is translated; a setting of the network or of the choice
of files that uv does not have under another name ends with status 1 and the name: then pip has to install.

    export UV_DEFAULT_INDEX=https://…    URLs may hold a password, so none is on a command line
    UV_FLAGS=(--no-index)                what uv has no variable for
"""

import ast
import os
import shlex
import sys
from collections.abc import Iterable, Mapping

SAME = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "trusted-host": "UV_INSECURE_HOST",
    "proxy": "ALL_PROXY",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
}
"""pip's name → uv's variable."""
SEPARATORS = {"UV_FIND_LINKS": ","}
"""Of several values, where it is no space."""
NO_INDEX = "no-index"
WITHOUT_EFFECT = frozenset(
    {
        *(
            "break-system-packages",
            "cache-dir",
            "compile",
            "disable-pip-version-check",
            "exists-action",
            "no-cache-dir",
        ),
        *("no-color", "no-compile", "no-input", "no-warn-script-location", "prefer-binary", "progress-bar"),
        *("quiet", "require-virtualenv", "retries", "root-user-action", "upgrade-strategy", "use-pep517", "verbose"),
        *("no-python-version-warning", "log", "log-file", "no-dependencies", "no-deps", "require-hashes"),
    }
)
"""On which files are installed, of a lock with hashes; pip alone is quiet, colorful or asked for a cache."""
AUTHORITIES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
"""Variables of a file of certificates that pip reads as well."""
SECTIONS = ("global", "install", ":env:")
"""Of pip's settings; a later one counts more."""


class UnknownError(Exception):
    """A setting that has no translation."""


def settings(lines: Iterable[str]) -> dict[str, str]:
    """pip's settings for `pip install`, by name, from what `pip config list` prints."""
    found: dict[str, dict[str, str]] = {section: {} for section in SECTIONS}
    for line in lines:
        name, is_setting, value = line.strip().partition("=")
        section, _, option = name.partition(".")
        if is_setting and section in found:
            found[section][option] = str(ast.literal_eval(value))
    return {option: value for section in SECTIONS for option, value in found[section].items()}


def assignments(given: Mapping[str, str], environment: Mapping[str, str]) -> list[str]:
    """Lines for a shell. What is already in the `environment` for uv stays.

    Raises:
        UnknownError: a setting of pip has no equivalent in uv.
    """
    variables, flags = {}, []
    for option, value in given.items():
        if option == NO_INDEX:
            flags += ["--no-index"] if value.lower() in {"1", "true", "yes", "on"} else []
        elif option in SAME:
            variable = SAME[option]
            variables[variable] = SEPARATORS.get(variable, " ").join(value.split())
        elif option not in WITHOUT_EFFECT:
            raise UnknownError(option)
    authority = next((environment[name] for name in AUTHORITIES if environment.get(name)), None)
    if authority is not None:
        variables.setdefault("SSL_CERT_FILE", authority)
    exports = [f"export {name}={shlex.quote(value)}" for name, value in variables.items() if name not in environment]
    return [*exports, f"UV_FLAGS=({' '.join(flags)})"]


def main() -> int:
    """Exit status."""
    try:
        lines = assignments(settings(sys.stdin), os.environ)
    except UnknownError as option:
        print(f"pip is set to {option}, which uv does not have", file=sys.stderr)
        return 1
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
