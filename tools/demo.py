"""Records docs/assets/demo.svg from a real run: `tandem serve`, a chat, a request with curl, then an own folder.

    .venv/bin/python tools/demo.py                    needs tmux and curl; takes a minute

A tmux session runs the commands. What its screen shows is captured with its colors several times per
second, and each different screen becomes a frame of an animated SVG, without scripts and fonts from elsewhere. The
commit is in the file's title.
"""

import argparse
import io
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import TerminalTheme
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
COLUMNS, ROWS = 88, 24
CELL_W, CELL_H, MARGIN = 8.4, 18, 14
PERIOD_S = 0.1
PATIENCE_S = 300.0
MAX_FRAME_S = 1.5
"""A screen that did not change is not shown for longer: a start on a slow machine would be tedious."""
END_S = 6.0
MAX_BYTES = 400_000
# As words: a shell in between would forget the prompt.
SHELL = ["bash", "--norc", "--noprofile"]
QUESTION = "Tell me about a fox."
OWN = "my-model"
"""A folder in the user's home; here a copy of the bundled model."""
THEME = TerminalTheme(
    (27, 31, 35),
    (214, 222, 230),
    [
        (60, 66, 74),
        (224, 108, 117),
        (120, 190, 130),
        (220, 183, 102),
        (97, 175, 239),
        (198, 120, 221),
        (111, 195, 209),
        (214, 222, 230),
    ],
    [
        (110, 118, 128),
        (240, 130, 138),
        (150, 215, 160),
        (240, 205, 130),
        (130, 195, 250),
        (215, 150, 235),
        (140, 215, 225),
        (255, 255, 255),
    ],
)


@dataclass(kw_only=True)
class Recording:
    """One tmux session, and the screens that it has shown."""

    tmux: list[str]
    frames: list[tuple[str, float]] = field(default_factory=list)
    """Each screen with the seconds that it stays."""

    def run(self, *args: str) -> str:
        return subprocess.run([*self.tmux, *args], capture_output=True, text=True, check=True).stdout

    def look(self) -> str:
        """Captures the screen; returns its text."""
        screen = self.run("capture-pane", "-e", "-p", "-t", "demo")
        if not self.frames or self.frames[-1][0] != screen:
            self.frames.append((screen, 0.0))
        last, shown_s = self.frames[-1]
        self.frames[-1] = (last, min(shown_s + PERIOD_S, MAX_FRAME_S))
        return Text.from_ansi(screen).plain

    def wait_for(self, condition: Callable[[str], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition(text := self.look()):
            if time.monotonic() > deadline:
                raise SystemExit(f"the screen does not show what was waited for:\n{text}")
            time.sleep(PERIOD_S)

    def stay(self, seconds: float) -> None:
        for _ in range(round(seconds / PERIOD_S)):
            self.look()
            time.sleep(PERIOD_S)

    def type(self, text: str) -> None:
        """As a person would; then Enter."""
        for character in text:
            self.run("send-keys", "-t", "demo", "-l", character)
            self.look()
        self.run("send-keys", "-t", "demo", "Enter")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def recording(folder: Path) -> Iterator[Recording]:
    """A shell whose prompt is `$`, in a home of its own, with this checkout's `tandem` in its path."""
    bin_dir = Path(sys.executable).parent
    variables = {
        "HOME": str(folder),
        "PATH": f"{bin_dir}:{os.environ['PATH']}",
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache")),
        "XDG_STATE_HOME": str(folder / "state"),
        "PS1": "$ ",
        "HISTFILE": "",
    }
    tmux = ["tmux", "-f", "/dev/null", "-S", str(folder / "socket")]
    settings = [word for name, value in variables.items() for word in ("-e", f"{name}={value}")]
    size = ["-x", str(COLUMNS), "-y", str(ROWS)]
    subprocess.run([*tmux, "new-session", "-d", "-s", "demo", *size, *settings, *SHELL], check=True)
    try:
        yield Recording(tmux=tmux)
    finally:
        subprocess.run([*tmux, "kill-server"], check=True)


def perform(demo: Recording, port: int) -> None:
    """The run itself."""
    url = f"http://127.0.0.1:{port}"
    demo.run("set", "-g", "status", "off")
    demo.wait_for(lambda screen: "$" in screen)
    demo.type(f"tandem serve --port {port}")
    demo.wait_for(lambda screen: "/console" in screen)
    demo.stay(2)
    # A second terminal.
    demo.run("new-window", "-t", "demo", *SHELL)
    demo.wait_for(lambda screen: screen.strip() == "$")
    demo.type(f"tandem chat --url {url} --max-tokens 60")
    demo.wait_for(lambda screen: "you>" in screen)
    demo.type(QUESTION)
    demo.wait_for(lambda screen: screen.count("you>") == 2)
    demo.stay(1)
    demo.type("/explain")
    demo.wait_for(lambda screen: screen.count("you>") == 3)
    demo.stay(2)
    demo.type("/quit")
    demo.wait_for(lambda screen: screen.rstrip().endswith("$"))
    ask(demo, url, "tandem-mini")
    end(demo, window=0)
    # The folder of the user: any that `save_pretrained` writes.
    demo.run("new-window", "-t", "demo", *SHELL)
    demo.wait_for(lambda screen: screen.strip() == "$")
    demo.type(f"tandem serve ~/{OWN} --dtype float32 --port {port}")
    demo.wait_for(lambda screen: "/console" in screen)
    demo.stay(1)
    demo.run("new-window", "-t", "demo", *SHELL)
    demo.wait_for(lambda screen: screen.strip() == "$")
    ask(demo, url, OWN)
    end(demo, window=2)


def ask(demo: Recording, url: str, model: str) -> None:
    """By curl, in the window that is shown."""
    body = f'{{"model": "{model}", "prompt": "Once upon", "max_tokens": 12}}'
    demo.type(f"curl -s {url}/v1/completions -H 'Content-Type: application/json' -d '{body}'")
    demo.wait_for(lambda screen: "system_fingerprint" in screen.replace("\n", ""))
    demo.stay(1)


def end(demo: Recording, *, window: int) -> None:
    """Ctrl-C in another window. What is printed there then is not recorded."""
    demo.run("send-keys", "-t", f"demo:{window}", "C-c")
    deadline = time.monotonic() + PATIENCE_S
    while demo.run("display-message", "-p", "-t", f"demo:{window}", "#{pane_current_command}").strip() != "bash":
        if time.monotonic() > deadline:
            raise SystemExit("tandem serve does not end")
        time.sleep(PERIOD_S)


class Drawing:
    """Frames as an animated SVG. A line that many frames have is there once."""

    def __init__(self) -> None:
        self._console = Console(width=COLUMNS, force_terminal=True, color_system="truecolor", file=io.StringIO())
        self._lines: dict[str, str] = {}
        """Pictures of lines → their names."""

    def draw(self, frames: list[tuple[str, float]], title: str) -> str:
        frames = [*frames[:-1], (frames[-1][0], END_S)]
        whole_s = sum(shown_s for _, shown_s in frames)
        groups, at = [], 0.0
        for number, (screen, shown_s) in enumerate(frames):
            last = number == len(frames) - 1
            groups.append(self._frame(screen, at / whole_s, 1.0 if last else (at + shown_s) / whole_s, whole_s, last))
            at += shown_s
        width, height = COLUMNS * CELL_W + 2 * MARGIN, ROWS * CELL_H + 2 * MARGIN
        lines = "".join(f'<g id="{name}">{picture}</g>' for picture, name in self._lines.items())
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}">'
            f"<title>{escape(title)}</title>"
            "<style>text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;"
            "white-space:pre}</style>"
            f'<rect width="100%" height="100%" rx="8" fill="{THEME.background_color.hex}"/>'
            f"<defs>{lines}</defs>{''.join(groups)}</svg>\n"
        )

    def _frame(self, screen: str, begin: float, end: float, whole_s: float, last: bool) -> str:
        uses = []
        for row, line in enumerate(Text.from_ansi(screen).split("\n")):
            picture = self._line(line)
            if picture:
                name = self._lines.setdefault(picture, f"l{len(self._lines)}")
                uses.append(f'<use href="#{name}" y="{MARGIN + row * CELL_H}"/>')
        # Where nothing is animated, the last frame is shown.
        values, times = (
            ("visible;hidden", f"0;{end:.4f}") if begin == 0 else ("hidden;visible;hidden", f"0;{begin:.4f};{end:.4f}")
        )
        if last:
            values, times = "hidden;visible", f"0;{begin:.4f}"
        return (
            f'<g visibility="{"visible" if last else "hidden"}">{"".join(uses)}<animate attributeName="visibility" '
            f'calcMode="discrete" values="{values}" keyTimes="{times}" dur="{whole_s:.1f}s" '
            'repeatCount="indefinite"/></g>'
        )

    def _line(self, line: Text) -> str:
        parts, column = [], 0
        for segment in line.render(self._console):
            width = cell_len(segment.text)
            if segment.text.strip() or (segment.style and segment.style.bgcolor):
                parts.append(self._span(segment.text, segment.style or Style(), column, width))
            column += width
        return "".join(parts)

    @staticmethod
    def _span(text: str, style: Style, column: int, width: int) -> str:
        x, w = MARGIN + column * CELL_W, width * CELL_W
        color = style.color.get_truecolor(THEME).hex if style.color else THEME.foreground_color.hex
        look = (
            f' fill="{color}"' + (' font-weight="600"' if style.bold else "") + (' opacity=".6"' if style.dim else "")
        )
        behind = ""
        if style.bgcolor and not style.bgcolor.is_default:
            fill = style.bgcolor.get_truecolor(THEME, foreground=False).hex
            behind = f'<rect x="{x:g}" width="{w:g}" height="{CELL_H}" fill="{fill}"/>'
        place = f'x="{x:g}" y="13" textLength="{w:g}" xml:space="preserve"'
        return f"{behind}<text {place}{look}>{escape(text, quote=False)}</text>"


def main() -> int:
    parser = argparse.ArgumentParser(description="Record docs/assets/demo.svg from a real run.")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/assets/demo.svg", metavar="FILE")
    args = parser.parse_args()
    missing = [name for name in ("tmux", "curl") if shutil.which(name) is None]
    if missing:
        print(f"not installed: {', '.join(missing)}", file=sys.stderr)
        return 1
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    with tempfile.TemporaryDirectory() as folder, recording(Path(folder)) as demo:
        shutil.copytree(ROOT / "models" / "tandem-mini", Path(folder) / OWN)
        perform(demo, free_port())
        picture = Drawing().draw(
            demo.frames, f"tandem serve, tandem chat, curl and an own folder; {commit.stdout.strip()}, tools/demo.py"
        )
    if len(picture.encode()) > MAX_BYTES:
        print(f"{len(picture.encode())} bytes are more than {MAX_BYTES}", file=sys.stderr)
        return 1
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(picture)
    print(f"{args.out}: {len(demo.frames)} frames, {len(picture.encode()) // 1024} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
