"""A gateway's record of a request as text, for `tandem chat` and `kubectl tandem explain`."""

from collections.abc import Iterator, Mapping
from typing import Any

from tandem_services.cli.text.tables import count, seconds, table

Record = Mapping[str, Any]


def explain_text(record: Record) -> str:
    """What happened to the request, choice by choice, attempt by attempt, and what else could have been chosen."""
    return "\n".join([_headline(record), *(line for choice in record["choices"] for line in _choice(choice))])


def _headline(record: Record) -> str:
    status = "running" if record["status"] is None else str(record["status"])
    parts = [
        record["request_id"],
        record["model"],
        record["endpoint"],
        status,
        f"{count(record['prompt_tokens'])} prompt tokens",
    ]
    if record["e2e_s"] is not None:
        parts.append(f"{seconds(record['e2e_s'])} in all")
    if record["error"]:
        parts.append(record["error"])
    return " · ".join(parts)


def _choice(choice: Record) -> Iterator[str]:
    phases = {
        "in the gateway's queue": choice["admission_s"],
        "in the worker's queue": choice["queue_s"],
        "of it for the scheduling delay": choice.get("delay_s"),
        "until its adapter was in memory": choice.get("adapter_wait_s"),
        "prefill": choice["prefill_s"],
        "first token after": choice["ttft_s"],
    }
    shown = ", ".join(f"{name} {seconds(value)}" for name, value in phases.items() if value is not None)
    cached = f"{count(choice['cached_tokens'] or 0)} of the prompt cached{_places(choice.get('cache_hits'))}"
    unusable = choice.get("unusable_tokens")
    if unusable:
        cached += f", {count(unusable)} more computed again: nothing was kept to continue from there"
    tokens = f"{count(choice['output_tokens'])} tokens, {cached}"
    yield f"choice {choice['index']}: {tokens}; {shown or 'nothing yet'}"
    moved = choice["transfer"]
    if moved:
        yield (
            f"  moved {count(moved['pages'])} pages, {moved['bytes'] / 2**20:.1f} MiB; "
            f"{seconds(moved['exposed_s'])} of it after the prompt was computed"
        )
    for number, attempt in enumerate(choice["attempts"], 1):
        yield from _attempt(attempt, number)


def _attempt(attempt: Record, number: int) -> Iterator[str]:
    price = sum(term["seconds"] for term in attempt["terms"])
    cell = attempt.get("cell")
    place = f" in cell {cell['name']} ({cell['reason']})" if cell else ""
    yield (
        f"  attempt {number}: {_workers(attempt)}{place}, {attempt['placement']}, chosen by {attempt['source']}, "
        f"predicted {seconds(price)}: {attempt['outcome']}"
    )
    expected = attempt.get("predicted")
    if expected:
        between = "" if expected["itl_s"] is None else f", {seconds(expected['itl_s'])} between tokens"
        shown = ", ".join(f"{term['name']} {seconds(term['seconds'])}" for term in expected["terms"] if term["seconds"])
        yield f"    predicted latency: first token after {seconds(expected['ttft_s'])}{between} ({shown})"
    candidates = attempt.get("candidates")
    if candidates:
        yield from _candidates(candidates)


def _candidates(candidates: Record) -> Iterator[str]:
    terms = [term for option in candidates["options"] for term in option["terms"]]
    shown = list(dict.fromkeys(term["name"] for term in terms if term["seconds"]))
    rows = [
        (
            "→ " + _workers(option) if number == 0 else "  " + _workers(option),
            seconds(option["predicted_s"]),
            _cached(option),
            count(option["fetch"]["tokens"]) if option["fetch"] else "-",
            *(seconds(_term(option, name)) if _term(option, name) else "-" for name in shown),
        )
        for number, option in enumerate(candidates["options"])
    ]
    header = ("  CHOSEN FROM", "SUM", "CACHED", "FETCH", *(name.replace("_", " ").upper() for name in shown))
    for line in table(header, rows).splitlines():
        yield f"    {line}"
    if candidates["more"]:
        yield f"      and {candidates['more']} more, dearer than these"


def _cached(option: Record) -> str:
    in_host = option.get("matched_host_tokens", 0)
    return count(option["matched_tokens"]) + (f" ({count(in_host)} host)" if in_host else "")


def _places(hits: Record | None) -> str:
    """Where cached tokens were, other than on the device."""
    names = {"host": "in host memory", "disk": "in files", "fetched": "fetched"}
    shown = [f"{count(hits[place])} {name}" for place, name in names.items() if hits[place]] if hits else []
    return f" ({', '.join(shown)})" if shown else ""


def _term(option: Record, name: str) -> float:
    return float(next((term["seconds"] for term in option["terms"] if term["name"] == name), 0.0))


def _workers(place: Record) -> str:
    names = [place["prefill"], place["decode"]]
    return " → ".join(name.rpartition("@")[0] for name in names if name)
