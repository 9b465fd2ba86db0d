"""Prompts that ask for the text between a prefix and a suffix."""

import json

import pytest

from tandem_engine.base.errors import InvalidRequestError
from tandem_engine.tokenizer.fill_in_middle import find_fim_marks
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_testing.tokenizer_builders import SPECIALS, tokenizer_document, write_tokenizer

MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


def with_marks(folder):
    document = json.loads(tokenizer_document())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for i, mark in enumerate(MARKS):
        document["added_tokens"].append({"id": 500 + i, "content": mark, "special": False, **flags})
    document["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": SPECIALS[0], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {SPECIALS[0]: {"id": SPECIALS[0], "ids": [0], "tokens": [SPECIALS[0]]}},
    }
    write_tokenizer(folder)
    (folder / "tokenizer.json").write_text(json.dumps(document), "utf-8")
    return TextTokenizer.load(folder)


def test_middle_prompt_equals_the_marked_text(tmp_path):
    tokenizer = with_marks(tmp_path)
    marked = "<|fim_prefix|>a = <|im_end|><|fim_suffix|>\nb<|fim_middle|>"
    assert tokenizer.encode_middle("a = <|im_end|>", "\nb") == tokenizer.encode(marked)
    assert tokenizer.encode(marked)[0] == 0, "the tokenizer begins texts with a special token"
    plain = tokenizer.encode_middle("a = <|im_end|>", "\nb", add_special_tokens=False, parse_special_tokens=False)
    assert plain == tokenizer.encode(marked, add_special_tokens=False, parse_special_tokens=False)
    assert 2 not in plain


def test_tokenizer_without_marks_cannot_fill_in(tmp_path):
    with pytest.raises(InvalidRequestError, match="no tokens that mark"):
        TextTokenizer.load(write_tokenizer(tmp_path)).encode_middle("a", "b")


def test_fim_marks_are_found_only_as_a_complete_set_of_one_family():
    assert find_fim_marks({"<fim_prefix>": 1, "<fim_suffix>": 2}.get) is None
    assert find_fim_marks({"<|fim_prefix|>": 1, "<fim_suffix>": 2, "<fim_middle>": 3}.get) is None
    found = find_fim_marks({"▁<PRE>": 1, "▁<SUF>": 2, "▁<MID>": 3, "▁<EOT>": 4}.get)
    assert found is not None
    assert found.end == 4
    assert found.around([10], [20, 21]) == [1, 10, 2, 20, 21, 3]
