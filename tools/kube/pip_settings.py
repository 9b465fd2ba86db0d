"""Let pip inside a build find packages as it does here: `pip_settings.py OUTPUT` writes its settings as a pip.conf.

Prints the local files and folders that they name, as volumes ("PATH:PATH:ro", a certificate at a place of its own: the
one that it has here belongs to a package). Without settings the file is empty and nothing is printed.
"""

import configparser
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

CERTIFICATE = "/run/host-certificates.crt"
PLACES = ("index-url", "extra-index-url", "find-links")
KEPT = (*PLACES, "trusted-host", "default-timeout", "timeout")


def settings() -> dict[str, str]:
    """Of pip here, from its files and its environment; the latter wins."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True)
    found = {}
    for line in sorted(listed.stdout.splitlines(), key=lambda line: line.startswith(":env:")):
        name, _, value = line.partition("=")
        # The value is Python's repr of a string.
        found[name.rpartition(".")[2]] = value.strip("'\"").replace("\\n", "\n")
    return found


def local_paths(value: str) -> list[str]:
    """Folders of this machine among the words of a setting, as far as they exist."""
    paths = [urlsplit(word).path for word in value.split() if urlsplit(word).scheme in ("", "file")]
    # An index is a folder `simple` whose pages refer to others beside it.
    roots = [str(Path(path).parent) if Path(path).name == "simple" else path for path in paths]
    return [root for root in roots if Path(root).exists()]


def main() -> None:
    """Writes the file and prints the volumes."""
    found = settings()
    chosen = {name: value for name, value in found.items() if name in KEPT}
    volumes = [f"{path}:{path}:ro" for name in PLACES for path in local_paths(found.get(name, ""))]
    if "cert" in found:
        chosen["cert"] = CERTIFICATE
        volumes.append(f"{Path(found['cert']).resolve()}:{CERTIFICATE}:ro")
    config = configparser.RawConfigParser()
    config["global"] = chosen
    with Path(sys.argv[1]).open("w", encoding="utf-8") as file:
        config.write(file)
    for volume in dict.fromkeys(volumes):
        print(volume)


if __name__ == "__main__":
    main()
