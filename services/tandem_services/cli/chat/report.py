"""What a turn took, in one line."""

from typing import Any

from tandem_services.cli.chat.conversation import Turn


def report(turn: Turn, explained: dict[str, Any]) -> str:
    """Tokens, cached tokens, speed, workers, what moved. `explained`: the gateway's record, where there is one."""
    prompt = turn.usage.get("prompt_tokens", 0)
    cached = (turn.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    output = turn.usage.get("completion_tokens", 0)
    parts = [f"{prompt} prompt tokens ({cached} cached)", f"{output} out"]
    if turn.first_token is not None and turn.ended is not None:
        parts.append(f"first after {(turn.first_token - turn.began) * 1e3:.0f} ms")
        if output > 1:
            parts.append(f"{(output - 1) / max(turn.ended - turn.first_token, 1e-9):.0f} tokens/s")
    for choice in explained.get("choices", [])[:1]:
        last = choice["attempts"][-1] if choice["attempts"] else {}
        parts.append(" → ".join(_worker(last[role]) for role in ("prefill", "decode") if last.get(role)))
        moved = choice.get("transfer")
        if moved:
            parts.append(f"{moved['pages']} pages, {moved['bytes'] / 1024:.0f} KiB moved")
    return " · ".join(part for part in parts if part)


def _worker(incarnation: str) -> str:
    """The stable name in `worker_id@number`."""
    return incarnation.rpartition("@")[0]
