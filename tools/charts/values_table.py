"""Tables of values in the charts' READMEs: names and defaults from values.yaml, words from values.schema.json."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

Json = dict[str, Any]

BEGIN = "<!-- values: written by tools/charts/write.py -->\n"
END = "<!-- end of values -->\n"


def readme(chart: Path, schema: Json) -> str:
    """README.md of `chart` with its table as it should be. Raises `ValueError` without the marks around the table."""
    text = (chart / "README.md").read_text("utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{chart / 'README.md'} has no table between {BEGIN.strip()} and {END.strip()}")
    defaults = yaml.safe_load((chart / "values.yaml").read_text("utf-8"))
    rows = "".join(_row(path, one, default) for path, one, default in values(schema, defaults))
    return f"{before}{BEGIN}| value | default | what it is |\n|---|---|---|\n{rows}{END}{after}"


def values(schema: Json, defaults: Json, path: str = "") -> Iterator[tuple[str, Json, Any]]:
    """Each value that has a default or no parts of its own: name, schema, default (None: none)."""
    for name, one in schema["properties"].items():
        if name == "global":
            continue
        here, default = f"{path}{name}", defaults.get(name)
        if "properties" in one and default:
            yield from values(one, default, f"{here}.")
        else:
            yield here, one, default


def _row(path: str, one: Json, default: Any) -> str:
    shown = "" if default is None else f"`{json.dumps(default)}`"
    words = one["description"]
    if "enum" in one and not any(f"`{word}`" in words for word in one["enum"]):
        words = f"{words} {', '.join(f'`{word}`' for word in one['enum'])}"
    return f"| `{path}` | {shown} | {words} |\n".replace("\\", "\\\\")
