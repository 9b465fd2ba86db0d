"""What `tandem doctor --bundle` packs: findings, settings and the ends of logs, for a report to others.

Neither secrets nor prompts: of the environment only names and harmless values; of logs only records of Tandem's own
format from INFO on, with what stands in quotation marks, credentials and the values of exceptions left out. Lines of
another format are dropped, except those of Redis, which sees no prompts.
"""

import io
import json
import re
import tarfile
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from tandem_services.common.private_folder import new_contents

MAX_LOG_BYTES = 256 << 10
"""Of each log, from its end."""

PREFIXES = ("TANDEM_", "HF_", "UCX_", "NIXL_", "NCCL_", "CUDA_", "NVIDIA_", "OMP_", "NUMBA_", "XDG_", "OTEL_", "LD_")
HARMLESS = frozenset(
    """TANDEM_CLUSTER TANDEM_LOG_LEVEL TANDEM_HOST TANDEM_HEALTH_HOST TANDEM_WORKER_ID TANDEM_STANDBY TANDEM_PEER_GROUP
    TANDEM_CACHE_DIR TANDEM_KERNELS_PATH TANDEM_KERNEL_TARGET
    HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE UCX_TLS UCX_NET_DEVICES CUDA_VISIBLE_DEVICES OMP_NUM_THREADS
    XDG_CACHE_HOME XDG_STATE_HOME LD_LIBRARY_PATH""".split()
)
"""Variables whose values may be shown."""

HIDDEN = "…"

_PLAIN = re.compile(r"(?:\S+ )?\d\d:\d\d:\d\d\.\d{3} (?P<level>[A-Z]+) ")
_STAMP = re.compile(r"\d\d:\d\d:\d\d\.\d{3} ")
"""Added to lines without a time (`logs.pump`)."""

_REDIS = re.compile(r"\d+:[MCSX] \d\d \w{3} \d{4} ")
_FRAME = re.compile(r"(Traceback \(most recent call last\):|\s+File \".+\", line \d+, in \S+)$")
_ERROR = re.compile(r"(?P<type>[\w.]+(?:Error|Exception|Interrupt|Exit|Timeout|Warning))(?::.*)?$")
_LEVELS = frozenset(("INFO", "WARNING", "ERROR", "CRITICAL"))
_REDACTIONS = (
    (re.compile(r"(\w+://)\S*@"), rf"\1{HIDDEN}@"),
    (re.compile(r"(?i)\b(bearer|token|password|secret|api[_-]?key)(\W{1,3})\S+"), rf"\1\2{HIDDEN}"),
    (re.compile(r"\b(?:hf_|sk-)[A-Za-z0-9_-]{6,}"), HIDDEN),
    (re.compile(r"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'"), f"'{HIDDEN}'"),
)


def shown_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Name → value, or that it is set."""
    names = sorted(name for name in variables if name.startswith(PREFIXES))
    return {name: variables[name] if name in HARMLESS else "(set)" for name in names}


def shown_log(text: str) -> str:
    """Of one log, the lines that the bundle has."""
    return "".join(f"{line}\n" for line in map(_shown_line, text.splitlines()) if line is not None)


def _shown_line(line: str) -> str | None:
    if line.startswith("{"):
        return _shown_object(line)
    record = _PLAIN.match(line)
    if record is not None:
        return _redacted(line) if record["level"] in _LEVELS else None
    if _REDIS.match(line):
        return _redacted(line)
    line = _STAMP.sub("", line)
    if _FRAME.match(line):
        return line
    error = _ERROR.match(line)
    return None if error is None else error["type"]


def _shown_object(line: str) -> str | None:
    """Of a record in JSON: what it is about, without its fields."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or record.get("level") not in _LEVELS:
        return None
    kept = {name: _redacted(str(record[name])) for name in ("time", "level", "logger", "message") if name in record}
    return json.dumps(kept, ensure_ascii=False)


def _redacted(text: str) -> str:
    for pattern, replacement in _REDACTIONS:
        text = pattern.sub(replacement, text)
    return text


def write_bundle(path: Path, *, findings: str, variables: Mapping[str, str], logs: Iterable[Path]) -> None:
    """A gzipped tar archive that only this user may read. Raises `OSError`."""
    secrets = _secret_values(variables)
    with new_contents(path) as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
        _add(archive, "findings.json", findings, secrets)
        _add(archive, "environment.json", json.dumps(shown_variables(variables), indent=1), secrets)
        for log in logs:
            _add(archive, f"logs/{log.parent.name}/{log.name}", shown_log(_end_of(log)), secrets)


def _secret_values(variables: Mapping[str, str]) -> list[str]:
    """Values of variables that are not harmless: they are hidden wherever they appear."""
    named = re.compile(r"KEY|TOKEN|PASS|SECRET|CREDENTIAL|AUTH|URL|HEADERS", re.IGNORECASE)
    return [value for name, value in variables.items() if named.search(name) and len(value) >= 6]


def _end_of(log: Path) -> str:
    with log.open("rb") as file:
        size = file.seek(0, io.SEEK_END)
        file.seek(max(0, size - MAX_LOG_BYTES))
        text = file.read(MAX_LOG_BYTES).decode("utf-8", "replace")
    return text if size <= MAX_LOG_BYTES else text.partition("\n")[2]


def _add(archive: tarfile.TarFile, name: str, text: str, secrets: Collection[str]) -> None:
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    content = text.encode()
    entry = tarfile.TarInfo(f"tandem-doctor/{name}")
    entry.size, entry.mode = len(content), 0o600
    archive.addfile(entry, io.BytesIO(content))
