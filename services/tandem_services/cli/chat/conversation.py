"""A conversation with a server: its messages, and the turns that are streamed from it."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tandem_services.common.errors import RemoteError


class Piece(NamedTuple):
    """New text of one chunk."""

    reasoning: str
    """What the model has written to itself."""
    content: str


@dataclass(kw_only=True, slots=True)
class Turn:
    """One streamed answer as it arrives."""

    began: float = field(default_factory=time.monotonic)
    response_id: str = ""
    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    first_token: float | None = None
    ended: float | None = None

    def take(self, chunk: dict[str, Any]) -> Piece:
        """The new text of one chunk. Raises `RemoteError` when the chunk is an error event."""
        if chunk.get("error"):
            raise RemoteError(_message(chunk["error"]))
        self.response_id = chunk.get("id", self.response_id)
        self.usage = chunk.get("usage") or self.usage
        piece = Piece(_joined(chunk, "reasoning_content"), _joined(chunk, "content"))
        if any(piece) and self.first_token is None:
            self.first_token = time.monotonic()
        self.text += piece.content
        return piece


@dataclass(kw_only=True, slots=True)
class Conversation:
    """Messages so far and where they go."""

    client: Any
    model: str
    options: dict[str, Any]
    system: str | None
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all turns."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    @contextmanager
    def ask(self, text: str) -> Iterator[tuple[Turn, Iterator[Piece]]]:
        """Stream the answer in the block; what arrived of it joins the conversation at the end of the block.

        A block that ends early closes the connection, which stops the request at the server. A turn without any text
        leaves the conversation as it was.
        """
        request = {
            **self.options,
            "model": self.model,
            "messages": [*self.messages, {"role": "user", "content": text}],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        turn = Turn()
        try:
            with self.client.stream("POST", "/v1/chat/completions", json=request) as response:
                if response.status_code != 200:
                    raise RemoteError(error_message(response.read(), response.status_code))
                yield turn, _pieces(response, turn)
            turn.ended = time.monotonic()
        finally:
            if turn.text:
                self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": turn.text}]

    def explain(self, turn: Turn) -> dict[str, Any]:
        """The gateway's record of the request; empty for a server without one."""
        response = self.client.get(f"/v1/requests/{turn.response_id}/explain")
        if response.status_code != 200 or "json" not in response.headers.get("content-type", ""):
            return {}
        found: dict[str, Any] = response.json()
        return found

    def served_models(self) -> list[str]:
        """Names of the models that the server has. Raises `RemoteError`."""
        response = self.client.get("/v1/models")
        if response.status_code != 200:
            raise RemoteError(error_message(response.read(), response.status_code))
        try:
            return [str(card["id"]) for card in response.json()["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise RemoteError(
                f"{self.client.base_url} does not serve /v1/models: give the address of a gateway with --url"
            ) from error


def _pieces(response: Any, turn: Turn) -> Iterator[Piece]:
    for line in response.iter_lines():
        name, _, data = (part.strip() for part in line.partition(":"))
        if name != "data" or data == "[DONE]":
            continue
        try:
            piece = turn.take(json.loads(data))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RemoteError(f"the server sent an event that is no chunk of a chat completion: {data[:80]}") from error
        yield piece


def _joined(chunk: dict[str, Any], name: str) -> str:
    return "".join(choice["delta"].get(name) or "" for choice in chunk.get("choices") or ())


def _message(error: Any) -> str:
    """Of an error event; some servers send its text alone."""
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or "the server reported an error")


def error_message(body: bytes, status: int) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {status}"
