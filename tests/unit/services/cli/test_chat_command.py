"""`tandem chat`: what of a stream is shown, where, and what the turn remembers."""

import io
import json

import httpx
import pytest

from tandem_services.cli.chat import Turn, converse
from tandem_services.cli.main import build_parser
from tandem_services.common.errors import RemoteError


def delta(**fields: str) -> dict:
    return {"id": "chatcmpl-1", "choices": [{"delta": fields}]}


class Stream(httpx.SyncByteStream):
    """Events of one answer; after them, where `interrupted`, Ctrl-C."""

    def __init__(self, chunks: list[dict], *, interrupted: bool) -> None:
        self._chunks = chunks
        self._interrupted = interrupted

    def __iter__(self):
        for chunk in self._chunks:
            yield f"data: {json.dumps(chunk)}\n\n".encode()
        if self._interrupted:
            raise KeyboardInterrupt


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def talk(monkeypatch, *answers: list[dict], said: str, terminal: bool, interrupted: bool = False) -> list[list[dict]]:
    """Hold the conversation; returns the messages of each request."""
    asked, left = [], list(answers)

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        if request.url.path != "/v1/chat/completions":
            return httpx.Response(404)
        asked.append(json.loads(request.content)["messages"])
        return httpx.Response(200, stream=Stream(left.pop(0), interrupted=interrupted and len(asked) == 1))

    monkeypatch.setattr("sys.stdin", Terminal(said) if terminal else io.StringIO(said))
    lines = iter(said.splitlines())
    monkeypatch.setattr("builtins.input", lambda _: next_line(lines))
    args = build_parser().parse_args(["chat"])
    with httpx.Client(base_url="http://gateway", transport=httpx.MockTransport(answer)) as client:
        assert converse(client, args) == 0
    return asked


def next_line(lines) -> str:
    try:
        return next(lines)
    except StopIteration:
        raise EOFError from None


THOUGHTFUL = [delta(reasoning_content="Hm."), delta(content="Hello"), delta(content="!")]


def test_reasoning_is_dim_on_a_terminal_and_no_part_of_the_conversation(monkeypatch) -> None:
    out = Terminal()
    monkeypatch.setattr("sys.stdout", out)
    asked = talk(monkeypatch, THOUGHTFUL, [delta(content="Bye.")], said="Hi\nand?", terminal=True)
    assert "\033[2mHm.\033[0mHello!" in out.getvalue()
    assert asked[1][1] == {"role": "assistant", "content": "Hello!"}


def test_reasoning_is_not_in_what_goes_to_a_pipe(monkeypatch, capsys) -> None:
    talk(monkeypatch, THOUGHTFUL, said="Hi", terminal=False)
    assert capsys.readouterr().out.startswith("Hello!\n[")


def test_ctrl_c_stops_an_answer_and_not_the_conversation(monkeypatch, capsys) -> None:
    asked = talk(monkeypatch, THOUGHTFUL, [delta(content="Bye.")], said="Hi\nand?", terminal=True, interrupted=True)
    assert asked[1] == [{"role": "user", "content": "and?"}]
    assert "stopped" in capsys.readouterr().err


def test_the_first_token_of_reasoning_is_the_first_token() -> None:
    """Tokens per second counted those of the reasoning and not its time."""
    turn = Turn()
    turn.take(delta(role="assistant", content=""))
    assert turn.first_token is None
    turn.take(delta(reasoning_content="Hm."))
    assert turn.first_token is not None
    assert turn.text == ""


def test_a_server_of_something_else_is_named(monkeypatch) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, text="<html>"))
    with (
        httpx.Client(base_url="http://gateway", transport=transport) as client,
        pytest.raises(RemoteError, match="http://gateway does not serve /v1/models"),
    ):
        converse(client, build_parser().parse_args(["chat"]))
