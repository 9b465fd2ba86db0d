"""Detokenizer, StopWindow and OutputText: streams equal whole texts, and stop strings never leak."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_engine.messages.sampling import SamplingParams
from tandem_engine.tokenizer.output_text import Detokenizer, OutputText, StopWindow
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_testing.tokenizer_builders import write_tokenizer

FAMILY = "👨‍👩‍👧‍👦 héllo 你好 é"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return TextTokenizer.load(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def test_no_piece_holds_half_a_character(tokenizer):  # [whole-characters]
    detokenizer = Detokenizer(tokenizer.vocabulary)
    pieces = [detokenizer.push(token) for token in tokenizer.encode(FAMILY)]
    assert "".join(pieces) == FAMILY
    assert not any("\ufffd" in piece for piece in pieces)


def test_incomplete_utf8_bytes_are_replaced_at_flush(tokenizer):
    first_byte = tokenizer.encode("é")[:1]
    detokenizer = Detokenizer(tokenizer.vocabulary)
    assert detokenizer.push(first_byte[0]) == ""
    assert detokenizer.flush() == "\ufffd" == tokenizer.decode(first_byte)


def test_only_requested_special_tokens_are_shown(tokenizer):
    end, start = (tokenizer.vocabulary.token_bytes.index(text) for text in (b"<|im_end|>", b"<|im_start|>"))
    detokenizer = Detokenizer(tokenizer.vocabulary, visible=frozenset({start}))
    assert [detokenizer.push(start), detokenizer.push(end)] == ["<|im_start|>", ""]


def test_invalid_character_does_not_delay_later_text(tokenizer):
    [half, _], [letter] = tokenizer.encode("é"), tokenizer.encode("x")
    detokenizer = Detokenizer(tokenizer.vocabulary)
    assert [detokenizer.push(half), detokenizer.push(letter)] == ["", "\ufffdx"]


@pytest.mark.parametrize(("skip", "text"), [(True, "hi"), (False, "hi<|im_end|>")])
def test_special_tokens_are_text_only_on_request(tokenizer, skip, text):
    detokenizer = Detokenizer(tokenizer.vocabulary, skip_special_tokens=skip)
    assert "".join(map(detokenizer.push, [*tokenizer.encode("hi"), 2])) == text


def test_ids_beyond_the_vocabulary_are_no_text(tokenizer):
    assert Detokenizer(tokenizer.vocabulary).push(tokenizer.vocab_size) == ""


def cut(pieces: list[str], stops: tuple[str, ...], *, keep_match: bool = False) -> tuple[str, str | None]:
    window, shown = StopWindow(stops, keep_match=keep_match), ""
    for piece in pieces:
        text, matched = window.push(piece)
        shown += text
        if matched is not None:
            return shown, matched
    return shown + window.flush(), None


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("hello STOP world", ("STOP",), ("hello ", "STOP")),
        ("aaab", ("aab",), ("a", "aab")),
        ("abc", ("abcd", "bc"), ("a", "bc")),
        ("abc", ("bc", "abc"), ("", "abc")),
        ("xSTOP", ("STOP", "ST"), ("x", "ST")),
        ("nothing here", ("STOP",), ("nothing here", None)),
        ("ends in ST", ("STOP",), ("ends in ST", None)),
        ("a👨‍👩‍👧b", ("👩",), ("a👨‍", "👩")),
        ("STOP", ("STOP",), ("", "STOP")),
    ],
)
def test_earliest_end_cuts_however_the_text_arrives(text, stops, expected):  # [stop-window] [stop-strings]
    assert cut([text], stops) == expected
    assert cut(list(text), stops) == expected


@given(
    pieces=st.lists(st.text(alphabet="ab", max_size=4)),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3).map(tuple),
)
def test_cut_does_not_depend_on_the_pieces(pieces, stops):  # [stop-window]
    text = "".join(pieces)
    assert cut(pieces, stops) == cut(list(text), stops) == cut([text], stops)


@given(pieces=st.lists(st.text(alphabet="abc", max_size=5)), stop=st.text(alphabet="abc", min_size=1, max_size=4))
def test_shown_text_excludes_stop_string_and_loses_nothing(pieces, stop):
    text = "".join(pieces)
    shown, matched = cut(pieces, (stop,))
    assert shown == (text.split(stop)[0] if matched else text)
    assert (matched is None) == (stop not in text)


def test_possible_beginning_of_a_stop_string_is_held_back():
    window = StopWindow(("STOP",))
    assert window.push("go ST").text == "go "
    assert window.push("ART").text == "START"


def test_match_stays_on_request():
    assert cut(["go ST", "OP on"], ("STOP",), keep_match=True) == ("go STOP", "STOP")


def test_stop_string_within_min_tokens_is_ordinary_text(tokenizer):
    ids = tokenizer.encode("a.b.c")
    assert len(ids) == 5
    output = OutputText(tokenizer.vocabulary, SamplingParams(max_tokens=9, min_tokens=2, stop=(".",)))
    cuts = [output.push(token) for token in ids[:4]]
    assert [piece.matched for piece in cuts] == [None, None, None, "."]
    assert "".join(piece.text for piece in cuts) == "a.b"


def test_stop_string_spanning_min_tokens_boundary_matches(tokenizer):
    ids = tokenizer.encode("xyz")
    assert len(ids) == 3
    output = OutputText(tokenizer.vocabulary, SamplingParams(max_tokens=9, min_tokens=2, stop=("yz", "y")))
    assert [output.push(token) for token in ids] == [("x", None), ("", None), ("", "yz")]
