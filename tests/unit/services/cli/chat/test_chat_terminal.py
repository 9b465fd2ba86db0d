"""`tandem chat` on a pty: what the terminal gets, the arrow keys, Ctrl-C."""

import shutil
import stat
import subprocess
import sys
from contextlib import contextmanager

import pytest

from tandem_services.cli.chat.loop import MAX_LINES
from tandem_testing.chat_server import ChatServer, chat_server
from tandem_testing.terminal import on_terminal
from tandem_testing.waiting import wait_for

TITLE = "\x1b]0;taken over\x07"
TEXT = f"A **bold** word {TITLE}and `code`.\n\n- an item of many words, more than a narrow line can have\n"
ANSWER = [{"reasoning_content": "Hm."}, *({"content": TEXT[at : at + 3]} for at in range(0, len(TEXT), 3))]
PROMPT = "you> "
CHAT = [sys.executable, "-m", "tandem_services.cli.main", "chat", "--url"]


@pytest.fixture
def state(tmp_path):
    return tmp_path / "state"


@pytest.fixture
def chat(state):
    @contextmanager
    def chat(server: ChatServer, *, columns: int = 80, **variables: str):
        env = {"TERM": "xterm-256color", "XDG_STATE_HOME": str(state), **variables}
        with on_terminal([*CHAT, server.url], columns=columns, env=env) as terminal:
            terminal.wait_for(PROMPT)
            yield terminal

    return chat


def end(terminal) -> str:
    terminal.type("/quit\n")
    assert terminal.end() == 0
    return terminal.output


def test_terminal_gets_markdown_without_codes_of_the_model(chat) -> None:
    with chat_server(ANSWER) as server, chat(server) as terminal:
        terminal.type("hi\n")
        terminal.wait_for(PROMPT, after=" out")
        output = end(terminal)
    assert "\x1b[1mbold\x1b[0m" in output
    assert "\x1b[2mHm.\x1b[0m" in output
    assert " • " in output
    assert TITLE not in output
    assert "�]0;taken over�" in output


def test_no_color_leaves_no_color(chat) -> None:
    with chat_server(ANSWER) as server, chat(server, NO_COLOR="1") as terminal:
        terminal.type("hi\n")
        terminal.wait_for(PROMPT, after=" out")
        output = end(terminal)
    assert "\x1b[1mbold" in output
    assert "\x1b[3" not in output
    assert ";40m" not in output


def test_dumb_terminal_of_20_columns_gets_wrapped_text(chat) -> None:
    with chat_server(ANSWER) as server, chat(server, columns=20, TERM="dumb") as terminal:
        terminal.type("hi\n")
        terminal.wait_for(PROMPT, after=" out")
        output = end(terminal)
    assert "\x1b" not in output
    answer = output[output.index("A **bold**") : output.index("[0")].split()
    assert "- an item of many\r\nwords, more than a\r\nnarrow line can have\r\n" in output, answer


def test_arrow_key_finds_lines_of_an_earlier_conversation(chat, state) -> None:
    with chat_server(ANSWER) as server:
        with chat(server) as terminal:
            terminal.type("remember me\n")
            terminal.wait_for(PROMPT, after=" out")
            end(terminal)
        with chat(server) as terminal:
            terminal.type("\x1b[A")
            terminal.wait_for("/quit", after=PROMPT)
            terminal.type("\x1b[A")
            terminal.wait_for("remember me", after=PROMPT)
            terminal.type("\n")
            terminal.wait_for(PROMPT, after=" out")
            end(terminal)
    assert [request["messages"][-1]["content"] for request in server.requests] == ["remember me"] * 2
    file = state / "tandem" / "chat_history"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_history_file_is_bounded_and_becomes_private(chat, state) -> None:
    file = state / "tandem" / "chat_history"
    file.parent.mkdir(parents=True)
    file.write_text("".join(f"line {number}\n" for number in range(MAX_LINES + 500)))
    file.chmod(0o644)
    with chat_server(ANSWER) as server, chat(server) as terminal:
        end(terminal)
    assert file.read_text().splitlines()[-2:] == [f"line {MAX_LINES + 499}", "/quit"]
    assert len(file.read_text().splitlines()) == MAX_LINES
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_history_file_that_is_a_link_is_not_written(chat, state, tmp_path) -> None:
    target = tmp_path / "target"
    target.write_text("theirs\n")
    (state / "tandem").mkdir(parents=True)
    (state / "tandem" / "chat_history").symlink_to(target)
    with chat_server(ANSWER) as server, chat(server) as terminal:
        assert "typed lines are not kept" in end(terminal)
    assert target.read_text() == "theirs\n"


def test_ctrl_c_closes_the_request_and_not_the_program(chat) -> None:
    with chat_server([{"content": "Endless "}], endless=True) as server, chat(server) as terminal:
        terminal.type("hi\n")
        terminal.wait_for("more")
        terminal.type("\x03")
        terminal.wait_for(PROMPT, after="(stopped)")
        wait_for(server.closed.is_set, 60.0)
        terminal.type("\x03")
        terminal.wait_for(PROMPT, after="(Ctrl-D or /quit ends)")
        terminal.type("\x04")
        assert terminal.end() == 0


def test_pipe_gets_plain_text_without_escapes(tmp_path) -> None:
    with chat_server(ANSWER) as server:
        done = subprocess.run(
            [*CHAT, server.url], input="hi\n", capture_output=True, text=True, timeout=120, check=True
        )
    assert done.stdout.startswith("A **bold** word �]0;taken over�and `code`.\n\n- an item of many words, more than")
    assert "\x1b" not in done.stdout
    assert "Hm." not in done.stdout


@pytest.mark.skipif(shutil.which("tmux") is None, reason="NOT CHECKED: tmux is not installed")
@pytest.mark.parametrize("columns", [20, 80, 200])
def test_screen_wraps_at_words_and_shows_every_line_once(columns: int, state, tmp_path) -> None:
    tmux = ["tmux", "-f", "/dev/null", "-S", str(tmp_path / "socket")]

    def screen() -> str:
        return subprocess.run(
            [*tmux, "capture-pane", "-p", "-S", "-", "-t", "chat"], capture_output=True, text=True, check=True
        ).stdout

    with chat_server(ANSWER) as server:
        size = ["-x", str(columns), "-y", "40", "-e", f"XDG_STATE_HOME={state}", "-e", "COLUMNS="]
        subprocess.run([*tmux, "new-session", "-d", "-s", "chat", *size, *CHAT, server.url], check=True)
        try:
            wait_for(lambda: PROMPT.strip() in screen(), 120.0, screen)
            subprocess.run([*tmux, "send-keys", "-t", "chat", "hi", "Enter"], check=True)
            wait_for(lambda: screen().count(PROMPT.strip()) == 2, 120.0, screen)
            found = screen()
        finally:
            subprocess.run([*tmux, "kill-server"], check=True)
    item = found[found.index(" • ") : found.index("0 prompt")]
    assert " ".join(item.split()) == "• an item of many words, more than a narrow line can have"
    assert found.count("A bold word") == 1
    assert found.count("Hm.") == 1
