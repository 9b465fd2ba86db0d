"""Text of a model on its way to a terminal: control codes, words, blocks of Markdown."""

import io

import pytest
from rich.console import Console

from tandem_services.cli.chat.display import WordWrap, harmless, render, split_blocks

DOCUMENT = """\
# Title

One paragraph
of two lines.

- first
- second

  still second

```python
# no heading

print("a")
```

| a | b |
|---|---|
| 1 | 2 |

> quoted

The end, [link](http://example.org).
"""


def wrapped(text: str, width: int, *, pieces: int) -> str:
    words = WordWrap(width)
    chunks = [text[begin : begin + pieces] for begin in range(0, len(text), pieces)]
    return "".join(words.add(chunk) for chunk in chunks) + words.end()


def shown(text: str, width: int = 60) -> str:
    console = Console(file=io.StringIO(), width=width)
    return "\n".join("".join(segment.text for segment in line) for line in render(console, text))


@pytest.mark.parametrize("code", ["\x1b", "\x07", "\x08", "\r", "\x00", "\x7f", "\x9b", "\ud800"])
def test_control_code_is_replaced(code: str) -> None:
    assert harmless(f"a{code}b") == "a�b"


def test_harmless_keeps_letters_tabs_and_line_ends() -> None:
    assert harmless("ä\t日本 🙂\r\nb") == "ä\t日本 🙂\nb"


@pytest.mark.parametrize("pieces", [1, 3, 1000])
def test_wrap_breaks_lines_between_words(pieces: int) -> None:
    assert wrapped("a short line of words\nand 日本語 here", 10, pieces=pieces) == (
        "a short\nline of\nwords\nand 日本語\nhere"
    )


def test_wrap_breaks_a_word_longer_than_a_line() -> None:
    assert wrapped("so: abcdefghijkl mn", 5, pieces=2) == "so:\nabcde\nfghij\nkl mn"


def test_blocks_of_a_growing_text_never_change() -> None:
    blocks: list[str] = []
    rest = ""
    for character in DOCUMENT:
        rest += character
        if character == "\n":
            new, rest = split_blocks(rest)
            blocks += new
    assert [*blocks, rest] == [*split_blocks(DOCUMENT)[0], split_blocks(DOCUMENT)[1]]
    assert len(blocks) == 6
    assert "".join(blocks) + rest == DOCUMENT


def test_lines_of_a_paragraph_stay_lines() -> None:
    assert shown("Roses are red,\nviolets are blue.") == "Roses are red,\nviolets are blue."


@pytest.mark.parametrize(
    ("text", "visible"),
    [
        ("a <b>tag</b> and List<int>", "a <b>tag</b> and List<int>"),
        ("<div>\nx\n</div>", "<div>\nx\n</div>"),
        ("[bank](http://evil.example)", "bank (http://evil.example)"),
        ("[a]: http://example.org", "[a]: http://example.org"),
        ("[bold]not markup of ours[/bold]", "[bold]not markup of ours[/bold]"),
    ],
)
def test_markdown_drops_no_text(text: str, visible: str) -> None:
    assert shown(text) == visible


def test_lines_fit_twenty_columns_and_keep_words() -> None:
    lines = shown("A sentence with several words that does not fit.\n\n```\ncode\n```", 20).splitlines()
    assert lines[:3] == ["A sentence with", "several words that", "does not fit."]
    assert max(len(line) for line in lines) <= 20
