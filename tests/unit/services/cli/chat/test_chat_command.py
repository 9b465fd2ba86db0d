"""`tandem chat`: what of a stream is shown, where, and what the turn remembers."""

import io
import json
import sys

import httpx
import pytest

from tandem_engine.base.errors import ConfigError
from tandem_services.cli.chat.command import converse
from tandem_services.cli.chat.conversation import Conversation, Turn
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


@pytest.fixture(autouse=True)
def state_folder(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def talk(
    monkeypatch, *answers: list[dict], entered: str, terminal: bool, interrupted: bool = False
) -> list[list[dict]]:
    """Hold the conversation; returns the messages of each request."""
    asked, left = [], list(answers)

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        if request.url.path != "/v1/chat/completions":
            return httpx.Response(404)
        asked.append(json.loads(request.content)["messages"])
        return httpx.Response(200, stream=Stream(left.pop(0), interrupted=interrupted and len(asked) == 1))

    monkeypatch.setattr("sys.stdin", Terminal(entered) if terminal else io.StringIO(entered))
    lines = iter(entered.splitlines())
    monkeypatch.setattr("builtins.input", lambda *_: next_line(lines))
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


def test_reasoning_is_no_part_of_the_conversation(monkeypatch) -> None:
    asked = talk(monkeypatch, THOUGHTFUL, [delta(content="Bye.")], entered="Hi\nand?", terminal=True)
    assert asked[1][1] == {"role": "assistant", "content": "Hello!"}


def test_piped_output_has_no_reasoning(monkeypatch, capsys) -> None:
    talk(monkeypatch, THOUGHTFUL, entered="Hi", terminal=False)
    assert capsys.readouterr().out.startswith("Hello!\n[")


def test_stopped_answer_stays_in_the_conversation(monkeypatch, capsys) -> None:
    asked = talk(monkeypatch, THOUGHTFUL, [delta(content="Bye.")], entered="Hi\nand?", terminal=True, interrupted=True)
    assert [message["content"] for message in asked[1]] == ["Hi", "Hello!", "and?"]
    assert "stopped" in capsys.readouterr().err


def test_stopped_answer_without_text_leaves_no_turn(monkeypatch) -> None:
    asked = talk(monkeypatch, [], [delta(content="Bye.")], entered="Hi\nand?", terminal=True, interrupted=True)
    assert [message["content"] for message in asked[1]] == ["and?"]


def test_clear_forgets_all_turns_but_the_system_message(monkeypatch) -> None:
    asked = talk(monkeypatch, THOUGHTFUL, THOUGHTFUL, entered="Hi\n/clear\nand?", terminal=True)
    assert [message["content"] for message in asked[1]] == ["and?"]


def test_model_command_lists_and_rejects_unknown_names(monkeypatch, capsys) -> None:
    assert talk(monkeypatch, entered="/model\n/model other\n/model m", terminal=True) == []
    output = capsys.readouterr()
    assert "* m" in output.err
    assert "the server has no model other: /model lists them" in output.err


def test_explain_reports_where_there_is_no_record(monkeypatch, capsys) -> None:
    talk(monkeypatch, THOUGHTFUL, entered="/explain\nHi\n/explain", terminal=True)
    printed = capsys.readouterr().err
    assert printed.index("no answer to explain") < printed.index("no record of the last answer")


def test_slash_lines_of_a_terminal_are_commands_of_a_pipe_text(monkeypatch, capsys) -> None:
    entered = "/etc/passwd?\n//clear it\n/what"
    typed = talk(monkeypatch, THOUGHTFUL, THOUGHTFUL, entered=entered, terminal=True)
    assert [messages[-1]["content"] for messages in typed] == ["/etc/passwd?", "/clear it"]
    assert "no command /what: /help lists them" in capsys.readouterr().err
    piped = talk(monkeypatch, THOUGHTFUL, THOUGHTFUL, THOUGHTFUL, entered=entered, terminal=False)
    assert [messages[-1]["content"] for messages in piped] == entered.splitlines()


def test_first_token_of_reasoning_is_the_first_token() -> None:
    """Tokens per second counted those of the reasoning and not its time."""
    turn = Turn()
    turn.take(delta(role="assistant", content=""))
    assert turn.first_token is None
    turn.take(delta(reasoning_content="Hm."))
    assert turn.first_token is not None
    assert turn.text == ""


def test_server_of_something_else_is_named(monkeypatch) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, text="<html>"))
    with (
        httpx.Client(base_url="http://gateway", transport=transport) as client,
        pytest.raises(RemoteError, match="http://gateway does not serve /v1/models"),
    ):
        converse(client, build_parser().parse_args(["chat"]))


def test_bytes_that_are_no_text_are_marked_in_the_request(monkeypatch) -> None:
    asked = talk(monkeypatch, [delta(content="A")], entered="caf\udce9", terminal=False)
    assert asked[0][0]["content"] == "caf?"


def test_input_in_another_encoding_ends_in_one_sentence(monkeypatch) -> None:
    def refuse() -> str:
        raise UnicodeDecodeError("utf-8", b"\xe9", 0, 1, "unexpected end of data")

    monkeypatch.setattr(sys.modules[__name__], "next_line", lambda _: refuse())
    with pytest.raises(ConfigError, match="standard input is not text in utf-8"):
        talk(monkeypatch, entered="Hi", terminal=False)


def streamed(body: str) -> str:
    """The content of one answer whose stream is `body`."""
    transport = httpx.MockTransport(lambda _: httpx.Response(200, text=body))
    with httpx.Client(base_url="http://gateway", transport=transport) as client:
        conversation = Conversation(client=client, model="m", options={}, system=None)
        with conversation.ask("Hi") as (turn, pieces):
            content = "".join(piece.content for piece in pieces)
        assert conversation.explain(turn) == {}
        return content


def test_events_of_other_servers_are_read() -> None:
    chunks = [{"choices": [{"delta": {"role": "assistant", "content": None}}]}, delta(content="A"), {"choices": None}]
    lines = [": a comment", *(f"data:{json.dumps(chunk)}" for chunk in chunks), "data: [DONE]", ""]
    assert streamed("\n\n".join(lines)) == "A"


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ('{"error": {"message": "no memory"}}', "no memory"),
        ('{"error": "no memory"}', "no memory"),
        ('{"error": {}, "choices": [{}]}', "no chunk of a chat completion"),
        ("<html>", "no chunk of a chat completion: <html>"),
        ("[]", "no chunk of a chat completion"),
    ],
)
def test_events_that_are_no_chunks_end_as_errors(data: str, sentence: str) -> None:
    with pytest.raises(RemoteError, match=sentence):
        streamed(f"data: {data}\n\n")
