"""The loop of a conversation: lines that a user types or pipes, commands among them, and answers.

A line of a pipe is always a message. On a terminal, a line that begins with / and a word is a command; with // it is a
message that begins with /.
"""

import os
import re
import stat
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from tandem_engine.base.errors import ConfigError
from tandem_services.cli.chat.conversation import Conversation, Turn
from tandem_services.cli.chat.display import Display, harmless
from tandem_services.cli.runs import state_folder
from tandem_services.cli.text.explanation import explain_text
from tandem_services.common.errors import RemoteError

# Lines typed at the prompt, for the arrow keys, kept from one conversation to the next.
#
# They are in a file that only this user can read, at most `MAX_LINES` of them. Without GNU readline in Python, or
# without a place for the file, lines are edited by what the terminal has.

HISTORY_FILE = "chat_history"
MAX_LINES = 1000
MAX_LINE_BYTES = 4096
"""Of a line that is kept: a document that was pasted is not."""


class LineHistory:
    """Of this process, which has one prompt."""

    def __init__(self, path: Path | None, editor: Any) -> None:
        self._path = path
        self._editor = editor

    @classmethod
    def load(cls) -> "LineHistory":
        """With the lines of earlier conversations; a reason why there are none is a line on standard error."""
        try:
            editor = import_module("readline")
        except ImportError:
            return cls(None, None)
        editor.set_auto_history(False)
        editor.set_history_length(MAX_LINES)
        try:
            path = _private_file(state_folder() / HISTORY_FILE)
            editor.read_history_file(path)
        except (OSError, ConfigError) as error:
            print(f"typed lines are not kept: {error}", file=sys.stderr)
            return cls(None, editor)
        return cls(path, editor)

    def add(self, line: str) -> None:
        """The newest."""
        if self._editor is None or len(line.encode(errors="replace")) > MAX_LINE_BYTES:
            return
        self._editor.add_history(line)
        if self._path is None:
            return
        try:
            # Each line at once: other conversations, and one that is killed, lose none.
            self._editor.append_history_file(1, _private_file(self._path))
        except OSError as error:
            print(f"typed lines are no longer kept: {error}", file=sys.stderr)
            self._path = None


def _private_file(path: Path) -> Path:
    """A file that this user alone can read, made where there is none. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            raise PermissionError(f"{path} is not a file of this user")
        os.fchmod(descriptor, 0o600)
    finally:
        os.close(descriptor)
    return path


PROMPT = "you> "

_COMMAND = re.compile(r"/([a-z?]+)(?:\s+(.*))?")

HELP = """\
/model          list the models of the server
/model NAME     continue with another model
/clear          forget all turns
/explain        what the last answer took: workers, queues, cache, transfer
/help           this list
/quit, Ctrl-D   end
Ctrl-C          stop the answer that is being written; the text so far stays in the conversation
Up, Down        earlier lines
//TEXT          a message that begins with a slash"""


def _encodable(line: str) -> str:
    """Bytes that are no text in the terminal's encoding are halves of characters in Python, which no request has."""
    return line.encode(errors="replace").decode()


class _Command(NamedTuple):
    name: str
    argument: str


class Loop:
    """One conversation, until its lines end."""

    def __init__(self, conversation: Conversation, display: Display, *, interactive: bool) -> None:
        self._conversation = conversation
        self._display = display
        self._interactive = interactive
        self._last: Turn | None = None
        self._failures = 0

    def run(self) -> int:
        """Returns the exit status: 1 when any turn failed."""
        if self._interactive:
            where = f"{self._conversation.model} at {self._conversation.client.base_url}"
            self._say(f"{where}: Ctrl-C stops an answer, /help lists the commands")
        for line in self._lines():
            command = self._command(line)
            if command is not None and command.name == "quit":
                break
            try:
                self._turn(line) if command is None else self._obey(command)
            except RemoteError as error:
                self._fail(str(error))
            except httpx.HTTPError as error:
                self._fail(f"{self._conversation.client.base_url} does not answer ({error})")
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                print("(stopped)", file=sys.stderr)
        return 1 if self._failures else 0

    def _fail(self, message: str) -> None:
        self._failures += 1
        print(f"error: {harmless(message)}", file=sys.stderr)

    def _lines(self) -> Iterator[str]:
        """Non-empty lines of the terminal or of standard input."""
        history = LineHistory.load() if self._interactive else None
        while True:
            try:
                line = _encodable(self._read()).strip()
            except EOFError:
                return
            except UnicodeDecodeError as error:
                raise ConfigError(f"standard input is not text in {error.encoding}") from error
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                self._say("\n(Ctrl-D or /quit ends)")
                continue
            if line and history is not None:
                history.add(line)
            if line:
                yield line

    def _read(self) -> str:
        if not self._interactive:
            return input()
        if sys.stdout.isatty():
            return input(PROMPT)
        print(PROMPT, end="", file=sys.stderr, flush=True)
        return input()

    def _command(self, line: str) -> _Command | None:
        found = _COMMAND.fullmatch(line) if self._interactive else None
        return None if found is None else _Command(found[1], (found[2] or "").strip())

    def _obey(self, command: _Command) -> None:
        match command.name:
            case "help" | "?":
                self._say(HELP)
            case "clear":
                self._conversation.clear()
                self._last = None
            case "model":
                self._choose(command.argument)
            case "explain":
                self._explain()
            case _:
                self._say(f"no command /{command.name}: /help lists them, //{command.name} … is a message")

    def _choose(self, name: str) -> None:
        served = self._conversation.served_models()
        if name and name not in served:
            self._say(f"the server has no model {name}: /model lists them")
            return
        self._conversation.model = name or self._conversation.model
        for each in [name] if name else served:
            self._say(f"{'*' if each == self._conversation.model else ' '} {each}")

    def _explain(self) -> None:
        record = self._conversation.explain(self._last) if self._last is not None else {}
        if record:
            self._say(explain_text(record))
        elif self._last is None:
            self._say("there is no answer to explain yet")
        else:
            self._say("the server has no record of the last answer")

    def _turn(self, line: str) -> None:
        text = line[1:] if self._interactive and line.startswith("//") else line
        with self._conversation.ask(text) as (turn, pieces):
            self._last = turn
            with self._display.answer() as show:
                for piece in pieces:
                    show(piece)
        self._display.note(_summary(turn, self._conversation.explain(turn)))

    def _say(self, text: str) -> None:
        """To the user; standard output is for answers where it is no terminal."""
        print(harmless(text), file=sys.stdout if sys.stdout.isatty() else sys.stderr)


def _summary(turn: Turn, explained: dict[str, Any]) -> str:
    """One line about a turn: tokens, speed, workers, what moved. `explained`: the record of the gateway, if any."""
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
