"""`tandem chat`: a conversation in the terminal, streamed from any OpenAI-compatible server."""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from tandem_engine.config.flags import positive_int
from tandem_services.cli.flags import add_api_key, key_headers, non_negative_float
from tandem_services.common.errors import RemoteError

EXAMPLES = """\
examples:
  tandem chat
  tandem chat --url http://10.0.0.5:8000 --system "Answer in one sentence."
  echo "Hello!" | tandem chat              one turn for each line of standard input

in the conversation: Ctrl-C stops an answer, /reset forgets all of it, /quit or Ctrl-D ends.
Reasoning is shown dim, on terminals alone.
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "chat",
        help="chat with a running server in the terminal",
        description="Chat with a served model; after each response print tokens, cached tokens, speed and workers.",
        epilog=EXAMPLES,
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="server (default: http://127.0.0.1:8000)")
    add_conversation(parser)
    parser.set_defaults(run=run)


def add_conversation(parser: argparse.ArgumentParser) -> None:
    """What a conversation is like, wherever it is held; see `converse`."""
    parser.add_argument("--model", metavar="NAME", help="model name (default: the first one served)")
    add_api_key(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--temperature", type=non_negative_float, default=0.0, help="0 is greedy (default: 0)")
    parser.add_argument(
        "--max-tokens", type=positive_int, metavar="N", help="maximum output tokens (default: what the context leaves)"
    )
    parser.add_argument("--seed", type=int, help="makes sampling repeatable")


@dataclass(kw_only=True, slots=True)
class Turn:
    """One streamed answer as it arrives."""

    began: float = field(default_factory=time.monotonic)
    response_id: str = ""
    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    first_token: float | None = None
    ended: float | None = None

    def take(self, chunk: dict[str, Any]) -> str:
        """The new text of one chunk; reasoning is none. Raises `RemoteError` when the chunk is an error event."""
        if "error" in chunk:
            raise RemoteError(str(chunk["error"].get("message", "the server reported an error")))
        self.response_id = chunk.get("id", self.response_id)
        self.usage = chunk.get("usage") or self.usage
        new = _joined(chunk, "content")
        if (new or reasoning_of(chunk)) and self.first_token is None:
            self.first_token = time.monotonic()
        self.text += new
        return new


@dataclass(kw_only=True, slots=True)
class Conversation:
    """Messages so far and where they go."""

    client: Any
    model: str
    options: dict[str, Any]
    messages: list[dict[str, str]]

    def ask(self, text: str) -> Iterator[tuple[Turn, str]]:
        """Stream the answer; the turn joins the conversation when it is complete."""
        request = {
            **self.options,
            "model": self.model,
            "messages": [*self.messages, {"role": "user", "content": text}],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        turn = Turn()
        with self.client.stream("POST", "/v1/chat/completions", json=request) as response:
            if response.status_code != 200:
                raise RemoteError(error_message(response.read(), response.status_code))
            for line in response.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                new = turn.take(chunk)
                yield turn, f"{_on_terminal(reasoning_of(chunk))}{new}"
        turn.ended = time.monotonic()
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": turn.text}]

    def explain(self, turn: Turn) -> dict[str, Any]:
        """The gateway's record of the request; empty for a server without one."""
        response = self.client.get(f"/v1/requests/{turn.response_id}/explain")
        found: dict[str, Any] = response.json() if response.status_code == 200 else {}
        return found


def reasoning_of(chunk: dict[str, Any]) -> str:
    """What the model has written to itself."""
    return _joined(chunk, "reasoning_content")


def _joined(chunk: dict[str, Any], name: str) -> str:
    return "".join(choice["delta"].get(name) or "" for choice in chunk.get("choices", ()))


def run(args: argparse.Namespace) -> int:
    import httpx

    headers = key_headers(args)
    with httpx.Client(base_url=args.url, headers=headers, timeout=httpx.Timeout(60.0, connect=5.0)) as client:
        try:
            return converse(client, args)
        except httpx.HTTPError as error:
            raise RemoteError(f"{args.url} does not answer ({error}): is `tandem up` running?") from error


def converse(client: Any, args: argparse.Namespace) -> int:
    """Hold a conversation over `client`; returns the exit status. Raises `RemoteError` and `httpx.HTTPError`."""
    return _talk(_open(client, args), system=args.system)


def _open(client: Any, args: argparse.Namespace) -> Conversation:
    response = client.get("/v1/models")
    if response.status_code != 200:
        raise RemoteError(error_message(response.read(), response.status_code))
    try:
        names = [card["id"] for card in response.json()["data"]]
    except (ValueError, KeyError, TypeError) as error:
        raise RemoteError(
            f"{client.base_url} does not serve /v1/models: give the address of a gateway with --url"
        ) from error
    model = args.model or (names[0] if names else "")
    options: dict[str, Any] = {"temperature": args.temperature}
    options |= {"max_tokens": args.max_tokens} if args.max_tokens is not None else {}
    options |= {"seed": args.seed} if args.seed is not None else {}
    return Conversation(client=client, model=model, options=options, messages=_system(args.system))


def _system(text: str | None) -> list[dict[str, str]]:
    return [{"role": "system", "content": text}] if text else []


def _talk(conversation: Conversation, *, system: str | None) -> int:
    interactive = sys.stdin.isatty()
    if interactive:
        where = f"{conversation.model} at {conversation.client.base_url}"
        print(f"{where}: Ctrl-C stops an answer, /reset forgets, /quit ends")
        _edit_lines()
    failures = 0
    for text in _lines(interactive):
        if text == "/quit":
            break
        if text == "/reset":
            conversation.messages = _system(system)
            continue
        try:
            _show(conversation, text)
        except RemoteError as error:
            failures += 1
            print(f"error: {error}", file=sys.stderr)
        except KeyboardInterrupt:
            if not interactive:
                raise
            print("\n(stopped; this turn is forgotten)", file=sys.stderr)
    return 1 if failures else 0


def _lines(interactive: bool) -> Iterator[str]:
    """Non-empty lines of the terminal or of standard input."""
    while True:
        try:
            line = input("you> " if interactive else "").strip()
        except EOFError:
            return
        if line:
            yield line


def _show(conversation: Conversation, text: str) -> None:
    turn = None
    for turn, new in conversation.ask(text):  # noqa: B007  the last turn is reported below
        print(new, end="", flush=True)
    print()
    if turn is not None:
        print(_dim(_report(turn, conversation.explain(turn))))


def _report(turn: Turn, explained: dict[str, Any]) -> str:
    """One line: tokens, cached tokens, speed, workers, what moved."""
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


def _edit_lines() -> None:
    """Arrow keys and history at the prompt, where Python was built with them."""
    with suppress(ImportError):
        import_module("readline")


def _dim(text: str) -> str:
    return _on_terminal(text) or f"[{text}]"


def _on_terminal(text: str) -> str:
    """Dim; nothing where output goes elsewhere."""
    return f"\033[2m{text}\033[0m" if text and sys.stdout.isatty() else ""


def error_message(body: bytes, status: int) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {status}"
