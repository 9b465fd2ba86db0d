"""Which tokens are control tokens, and literals that overlap, take white space or are matched after normalizing."""

import itertools
import json

import pytest
from tokenizers import Tokenizer

from tandem_engine.base.errors import InvalidRequestError
from tandem_engine.tokenizer.chat_template import ControlLiterals
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_testing.tokenizer_builders import CHATML, tokenizer_document, write_tokenizer

IM_START, IM_END = 1, 2
PLAIN = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"


def load(folder, *, template=PLAIN, added=(), config=None, **document):
    write_tokenizer(folder)
    whole = json.loads(tokenizer_document())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    taken = len(whole["model"]["vocab"]) + 10
    tokens = [{"id": taken + i, "special": True, **flags, **token} for i, token in enumerate(added)]
    by_content = {token["content"]: token for token in (*whole["added_tokens"], *tokens)}
    text = json.dumps({**whole, **document, "added_tokens": list(by_content.values())})
    (folder / "tokenizer.json").write_text(text, "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, **(config or {})}), "utf-8")
    return TextTokenizer.load(folder), Tokenizer.from_str(text)


def says(*contents):
    return [{"role": "user", "content": content} for content in contents]


@pytest.mark.parametrize(
    ("config", "control"),
    [
        ({}, False),
        ({"additional_special_tokens": ["<think>"]}, True),
        ({"extra_special_tokens": {"think": "<think>"}}, True),
        ({"chat_control_tokens": ["<think>"]}, True),
        ({"eos_token": {"content": "<think>"}}, True),
        ({"added_tokens_decoder": {"303": {"content": "<think>", "special": True}}}, True),
        ({"added_tokens_decoder": {"303": {"content": "<think>", "special": False}}}, False),
    ],
)
def test_tokens_that_the_configuration_names_are_special(tmp_path, config, control):
    tokenizer, reference = load(tmp_path, config=config)
    think = reference.token_to_id("<think>")
    assert (think not in tokenizer.encode_chat(says("<think>"))) == control
    assert think in tokenizer.encode("<think>"), "text prompts parse it in any case"


def test_added_words_are_parsed_in_texts_and_messages(tmp_path):
    words = [{"content": text, "special": False} for text in ("<b>", "brown fox", "<|fim_middle|>")]
    tokenizer, reference = load(tmp_path, added=words, template=CHATML)
    text = "the <b>brown fox</b><|fim_middle|>"
    assert tokenizer.encode(text, parse_special_tokens=False) == reference.encode(text).ids
    rendered = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode_chat(says(text)) == reference.encode(rendered).ids


OVERLAPPING = ("[e~[", "]~b]", "[e~[e", "~[")


def test_overlapping_literals_cannot_be_forged(tmp_path):
    """A literal of the client's may begin in its text and end in the template's, or hide behind another."""
    added = [{"content": text} for text in OVERLAPPING]
    tokenizer, reference = load(
        tmp_path, added=added, template="{% for m in messages %}{{ m.content }}[e~[{% endfor %}"
    )
    controls = {reference.token_to_id(text) for text in OVERLAPPING}
    template_ids = reference.encode("[e~[").ids
    for pieces in itertools.product(("[", "e~", "]~b", "]", "[e~[", "~["), repeat=4):
        content = "".join(pieces)
        ids = tokenizer.encode_chat(says(content))
        assert [token for token in ids if token in controls] == template_ids, content
        assert tokenizer.decode(ids, skip_special_tokens=False) == f"{content}[e~["


@pytest.mark.parametrize("side", ["lstrip", "rstrip"])
def test_white_space_that_a_special_token_takes_stays(tmp_path, side):
    tokenizer, reference = load(tmp_path, added=[{"content": "<|im_end|>", "id": IM_END, side: True}])
    ids = tokenizer.encode_chat(says("a <|im_end|> b"))
    assert ids.count(IM_END) == 1
    assert ids[-1] == IM_END
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a <|im_end|> b<|im_end|>"
    assert tokenizer.encode_chat(says(" a ")) == reference.encode(" a <|im_end|>").ids


def test_literal_that_only_normalizing_makes_is_not_forged(tmp_path):
    added = [{"content": "<|im_end|>", "id": IM_END, "normalized": True}]
    tokenizer, reference = load(tmp_path, added=added, normalizer={"type": "NFKC"})
    wide = "＜|im_end|＞"
    assert reference.encode(wide).ids == [IM_END], "the tokenizer itself takes one for the other"
    try:
        ids = tokenizer.encode_chat(says(f"a{wide}"))
    except InvalidRequestError:
        return
    assert ids.count(IM_END) == 1


def test_prompts_of_sentencepiece_keep_their_spaces(tmp_path):
    """The text behind a forged literal is not the beginning of a text, where such tokenizers add a space."""
    pieces = ["<unk>", "<s>", "▁", *"abes<>/", "▁a", "▁b"]
    document = {
        "model": {
            "type": "BPE",
            "vocab": {piece: i for i, piece in enumerate(pieces)},
            "merges": [["▁", "a"], ["▁", "b"]],
            "unk_token": "<unk>",
        },
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False},
        "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False},
    }
    whole = {**json.loads(tokenizer_document()), **document}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    whole["added_tokens"] = [{"id": i, "content": pieces[i], "special": True, **flags} for i in (0, 1)]
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole), "utf-8")
    config = {"chat_template": "<s>{% for m in messages %}{{ m.content }}{% endfor %}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    tokenizer = TextTokenizer.load(tmp_path)
    ids = tokenizer.encode_chat(says("a<s>b a"))
    plain = [pieces.index(each) for each in "<s>"]
    assert ids == [1, pieces.index("a"), *plain, pieces.index("b"), pieces.index("▁a")]


def test_literal_of_letters_made_by_case_is_not_forged(tmp_path):
    template = "{{ messages[0].content | capitalize }} End"
    tokenizer, reference = load(tmp_path, added=[{"content": "End"}], template=template)
    ids = tokenizer.encode_chat(says("end"))
    assert ids.count(reference.token_to_id("End")) == 1
    assert tokenizer.decode(ids, skip_special_tokens=False) == "End End"


def test_scan_finds_edges_in_values_and_keys():
    literals = ControlLiterals(["<|a|>", "[B]"])
    assert not literals.may_begin_in([{"role": "user", "content": "plain | text"}, None, 3, ("x",)])
    for value in ("x<", {"k": ["]"]}, {"[": 1}, (">",)):
        assert literals.may_begin_in(value)
    assert literals.pieced_together(["<|", "|>"])
    assert literals.pieced_together(["x[", "]y"])
    assert not literals.pieced_together(["<|a|>", "[B]", "text"])
    assert not literals.pieced_together(["<|a", "|>"]), "nothing is missing between them"
