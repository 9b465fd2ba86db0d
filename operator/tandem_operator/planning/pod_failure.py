"""Why a pod does not become ready, in one sentence: from the scheduler, the kubelet, or the container's exit message.

    scheduled? ─ no ─▶ the scheduler's sentence
    each container, init containers first:
        it failed, and is not running again   ─▶ status or signal, and its exit message
        it cannot be created                  ─▶ the kubelet's reason and sentence

A container that keeps failing is in turn terminated, waiting and running. All three give the same sentence, so that a
status has it once and not at every restart. Exit messages exist because our containers set
`terminationMessagePolicy: FallbackToLogsOnError`.
"""

import signal
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

_BACK_OFF = "CrashLoopBackOff"

_BAD_WAITING = (
    _BACK_OFF,
    "ImagePullBackOff",
    "ErrImagePull",
    "InvalidImageName",
    "ErrImageNeverPull",
    "ImageInspectError",
    "RegistryUnavailable",
    "SignatureValidationFailed",
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
)
_ERRORS = ("ERROR", "CRITICAL")
_OUT_OF_MEMORY = "OOMKilled"

_SIGNALLED = 128
"""Statuses above are this and the number of a signal."""


def pod_failure(status: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with a pod of this status, the most specific first; nothing without an error.

    Each on one line, without control characters, whatever its source.
    """
    for one in status.get("conditions", ()):
        if one["type"] == "PodScheduled" and one["status"] == "False" and one.get("message"):
            yield on_one_line(one["message"])
    for one in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
        failure = _container_failure(one)
        if failure:
            yield on_one_line(f"{one['name']}: {failure}")


def _container_failure(container: Mapping[str, Any]) -> str:
    failure, waiting = _failure(container), container.get("state", {}).get("waiting", {})
    reason = waiting.get("reason")
    if failure and reason in (None, _BACK_OFF):
        return _how_it_ended(failure)
    if reason in _BAD_WAITING:
        return f"{reason}: {waiting.get('message', '')}".rstrip(": ")
    # It runs, or is being created: that is no error.
    return ""


def _failure(container: Mapping[str, Any]) -> Mapping[str, Any]:
    """How it last ended, if that was a failure and it has not come up since; else empty."""
    state = container.get("state", {})
    if "running" in state and (container.get("started") or container.get("ready")):
        return {}
    ended: Mapping[str, Any] = state.get("terminated") or container.get("lastState", {}).get("terminated") or {}
    return ended if ended.get("exitCode") else {}


def _how_it_ended(ended: Mapping[str, Any]) -> str:
    if ended.get("reason") == _OUT_OF_MEMORY:
        return "OOMKilled: memory use exceeded resources.limits.memory"
    words = termination_message(ended.get("message", ""))
    return f"ended with {_status(ended['exitCode'])}" + (f": {words}" if words else "")


def _status(code: int) -> str:
    try:
        return signal.Signals(code - _SIGNALLED).name
    except ValueError:
        return f"status {code}"


def termination_message(log: str) -> str:
    """The error that a container ended with, from the end of its log; its last line where none is an error's.

    Lines are JSON records of ours, sentences of a command (`tandem: error: …`), or of any program. The kubelet keeps
    the end of a log alone, so that the first of them may be the end of a record.
    """
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    for line in reversed(lines):
        record = _record(line)
        if record is None and "error:" in line.lower():
            return _raised_in_rest(line)
        if record is not None and record.get("level") in _ERRORS:
            return _message(record)
    if not lines:
        return ""
    record = _record(lines[-1])
    return lines[-1] if record is None else _message(record)


def _record(line: str) -> dict[str, Any] | None:
    if not line.startswith("{"):
        return None
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _message(record: Mapping[str, Any]) -> str:
    """With the last line of a traceback, which has the exception."""
    message, raised = str(record.get("message") or ""), str(record.get("exception") or "").strip()
    # A process's own name differs from start to start: "worker NAME@NUMBER ends: why".
    _, ends, why = message.partition(" ends: ")
    return ": ".join(filter(None, (why if ends else message, raised.splitlines()[-1] if raised else "")))


def _raised_in_rest(line: str) -> str:
    """Of the end of a record with a traceback: what was raised. Any other line as it is."""
    if not line.endswith('"}'):
        return line
    _, _, raised = line.removesuffix('"}').rpartition(r"\n")
    return raised


def on_one_line(text: str) -> str:
    """Without control characters."""
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())
