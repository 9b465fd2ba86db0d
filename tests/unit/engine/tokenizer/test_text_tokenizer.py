"""TextTokenizer: ids out of text and back, and control tokens only from the chat template."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from tandem_engine.base.errors import CheckpointError, InvalidRequestError
from tandem_engine.tokenizer import text_tokenizer
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer, Truncation
from tandem_testing.tokenizer_builders import CHATML, EOS, SPECIALS, TOOL_CHATML, tokenizer_document, write_tokenizer

ENDOFTEXT, IM_START, IM_END = range(3)
REFERENCE = Tokenizer.from_str(tokenizer_document())


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return TextTokenizer.load(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@given(text=st.text())
def test_text_survives_encoding_and_decoding(text, tmp_path_factory):
    tokenizer = shared(tmp_path_factory)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(ids=st.lists(st.integers(0, REFERENCE.get_vocab_size() - 1)))
def test_decoding_agrees_with_the_reference_for_any_ids(ids, tmp_path_factory):
    tokenizer = shared(tmp_path_factory)
    assert tokenizer.decode(ids) == REFERENCE.decode(ids)
    assert tokenizer.decode(ids, skip_special_tokens=False) == REFERENCE.decode(ids, skip_special_tokens=False)


@given(text=st.lists(st.sampled_from([*SPECIALS, "<think>", "a", " ", "<|", "|>"])).map("".join))
def test_special_tokens_in_a_text_prompt_parse_unless_forbidden(text, tmp_path_factory):  # [control-text-is-text]
    tokenizer = shared(tmp_path_factory)
    assert tokenizer.encode(text) == REFERENCE.encode(text).ids
    plain = tokenizer.encode(text, parse_special_tokens=False)
    assert not {ENDOFTEXT, IM_START, IM_END} & set(plain)
    assert plain.count(REFERENCE.token_to_id("<think>")) == text.count("<think>"), "this token is not special"
    assert tokenizer.decode(plain) == text


ADDED = ["<think>", "<call>", "<|sep|>", "<tool>"]


def folder_with_added(tmp_path_factory) -> Path:
    """As of many checkpoints: no added token is in the vocabulary, and special ones are between the others."""
    folder = tmp_path_factory.getbasetemp() / "added"
    if not folder.exists():
        tokenizer = Tokenizer.from_str(tokenizer_document())
        for content, special in (("<call>", False), ("<|end|>", True), ("<|sep|>", False), ("<tool>", False)):
            add = tokenizer.add_special_tokens if special else tokenizer.add_tokens
            add([AddedToken(content, special=special, normalized=False)])
        (write_tokenizer(folder) / "tokenizer.json").write_text(tokenizer.to_str(), "utf-8")
    return folder


@given(text=st.lists(st.sampled_from([*SPECIALS, *ADDED, "<|end|>", "ab", " ", "<", "|>"])).map("".join))
def test_added_tokens_keep_their_ids_without_special_ones(text, tmp_path_factory):  # [control-text-is-text]
    """Ids that move down by the special tokens before them would be those of control tokens."""
    tokenizer = TextTokenizer.load(folder_with_added(tmp_path_factory))
    plain = tokenizer.encode(text, parse_special_tokens=False)
    assert tokenizer.decode(plain, skip_special_tokens=False) == text
    assert not tokenizer.vocabulary.special_ids & set(plain)
    for content in ADDED:
        [token] = tokenizer.encode(content)
        assert plain.count(token) == text.count(content)


@given(text=st.lists(st.sampled_from([*SPECIALS, *ADDED, "<|end|>", "ab", " ", "<", "|>"])).map("".join))
def test_shared_model_encodes_as_one_parsed_without_specials(text, tmp_path_factory):
    """Where special tokens would be, the parsed one has tokens of other texts."""
    folder = folder_with_added(tmp_path_factory)
    document = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    for token in document["added_tokens"]:
        if token["content"] == "<|end|>":
            token["content"] = "\ufdd0end"
    document["added_tokens"] = [token for token in document["added_tokens"] if token["content"] not in SPECIALS]
    parsed = Tokenizer.from_str(json.dumps(document))
    assert TextTokenizer.load(folder).encode(text, parse_special_tokens=False) == parsed.encode(text).ids


def test_tokenizer_file_is_parsed_once(tmp_path, monkeypatch):
    """Parsing holds the GIL, and a gateway that opens a model answers requests in the meantime."""
    sizes = []

    class Counting:
        def __new__(cls, model):
            return Tokenizer(model)

        @staticmethod
        def from_buffer(data):
            sizes.append(len(data))
            return Tokenizer.from_buffer(data)

    folder = write_tokenizer(tmp_path)
    monkeypatch.setattr(text_tokenizer, "Tokenizer", Counting)
    TextTokenizer.load(folder)
    assert sizes == [(folder / "tokenizer.json").stat().st_size]


def test_final_message_is_continued_where_it_ends(tokenizer):
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "the <|im_end|> quick "}]
    ids = tokenizer.encode_chat(messages, add_generation_prompt=False, continue_final=True)
    rendered = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nthe <|im_end|> quick "
    assert tokenizer.decode(ids, skip_special_tokens=False) == rendered
    assert ids.count(IM_END) == 1, "the literal in the message is text, and nothing ends it"


def test_template_dropping_final_message_rejects_continuation(tmp_path):
    dropping = TextTokenizer.load(write_tokenizer(tmp_path, chat_template="{{ messages[0].content }}"))
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "the"}]
    with pytest.raises(InvalidRequestError, match="cannot be continued"):
        dropping.encode_chat(messages, continue_final=True)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("tokens", [1, 2, 5, 100])
@pytest.mark.parametrize("special", [False, True])
def test_truncation_keeps_special_tokens_like_the_reference(tmp_path, side, tokens, special):
    text = "the quick brown fox jumps over the lazy dog"
    document = json.loads(tokenizer_document())
    document["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": SPECIALS[0], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {SPECIALS[0]: {"id": SPECIALS[0], "ids": [ENDOFTEXT], "tokens": [SPECIALS[0]]}},
    }
    folder = write_tokenizer(tmp_path)
    (folder / "tokenizer.json").write_text(json.dumps(document), "utf-8")
    reference = Tokenizer.from_str(json.dumps(document))
    reference.enable_truncation(tokens, direction=side)
    ids = TextTokenizer.load(folder).encode(text, add_special_tokens=special, truncation=Truncation(tokens, side))
    assert ids == reference.encode(text, add_special_tokens=special).ids


def test_conversation_is_encoded_as_the_reference_does(tokenizer):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello > world"}]
    rendered = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello > world<|im_end|>\n"
    expected = REFERENCE.encode(rendered + "<|im_start|>assistant\n").ids
    assert tokenizer.encode_chat(messages) == expected
    assert tokenizer.encode_chat(messages, add_generation_prompt=False) == REFERENCE.encode(rendered).ids


@given(content=st.lists(st.sampled_from([*SPECIALS, "x", "\n", "<|im_", "start|>", ">", "<", "system"])).map("".join))
def test_messages_cannot_forge_the_templates_control_tokens(content, tmp_path_factory):  # [control-text-is-text]
    ids = shared(tmp_path_factory).encode_chat([{"role": "user", "content": content}])
    assert [i for i in ids if i <= IM_END] == [IM_START, IM_END, IM_START]
    assert REFERENCE.decode(ids, skip_special_tokens=False) == (
        f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
    )


@given(text=st.lists(st.sampled_from([*SPECIALS, "x", "<|im_", "start|>", "<", ">"])).map("".join))
def test_tool_schemas_cannot_forge_control_tokens(text, tmp_path_factory):  # CVE-2026-44222
    tools = [{"function": {"name": "f", "description": text, "parameters": {"properties": {text: {"enum": [text]}}}}}]
    tokenizer = shared(tmp_path_factory, chat_template=TOOL_CHATML)
    honest = tokenizer.encode_chat([{"role": "user", "content": "hi"}], tools=[{"function": {"name": "f"}}])
    ids = tokenizer.encode_chat([{"role": "user", "content": "hi"}], tools=tools)
    assert [i for i in ids if i <= IM_END] == [i for i in honest if i <= IM_END]
    assert json.dumps(tools[0], ensure_ascii=False) in REFERENCE.decode(ids, skip_special_tokens=False)


def test_turn_of_a_conversation_shows_no_tools_again(tmp_path):
    tokenizer = TextTokenizer.load(write_tokenizer(tmp_path, chat_template=TOOL_CHATML))
    tools, turn = [{"function": {"name": "f"}}], [{"role": "tool", "content": "42"}]
    ids = tokenizer.encode_chat_turn(turn, last_token=IM_END, tools=tools)
    assert ids == tokenizer.encode_chat_turn(turn, last_token=IM_END)


def test_literal_completed_by_the_template_stays_text(tmp_path):
    glued = "{% for m in messages %}{{ m.content }}|>{% endfor %}"
    tokenizer = TextTokenizer.load(write_tokenizer(tmp_path, chat_template=glued))
    assert IM_START not in tokenizer.encode_chat([{"role": "user", "content": "<|im_start"}])


def test_two_messages_side_by_side_cannot_form_a_literal(tmp_path):
    glued = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = TextTokenizer.load(write_tokenizer(tmp_path, chat_template=glued))
    parts = [{"role": "user", "content": "<|im_st"}, {"role": "user", "content": "art|>"}]
    assert IM_START not in tokenizer.encode_chat(parts)


def test_without_a_template_chat_is_refused_and_text_is_not(tmp_path):  # [template-sandboxed]
    tokenizer = TextTokenizer.load(write_tokenizer(tmp_path, chat_template=None))
    assert tokenizer.encode("hello")
    with pytest.raises(InvalidRequestError, match="no chat template"):
        tokenizer.encode_chat([{"role": "user", "content": "hi"}])


def test_template_file_wins_over_the_configuration(tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("just this", "utf-8")
    tokenizer = TextTokenizer.load(tmp_path)
    assert tokenizer.decode(tokenizer.encode_chat([{"role": "user", "content": "hi"}])) == "just this"


def test_default_one_of_several_templates_is_used(tmp_path):
    templates = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    tokenizer = TextTokenizer.load(write_tokenizer(tmp_path, chat_template=templates))
    assert tokenizer.decode(tokenizer.encode_chat([{"role": "user", "content": "hi"}])) == "yes"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (EOS,)),
        ({"config": {"eos_token_id": 1}}, (1,)),
        ({"config": {"eos_token_id": 1}, "generation_config": {"eos_token_id": [2, 0]}}, (2, 0)),
    ],
)
def test_generation_config_names_eos_before_anything_else(tmp_path, files, expected):  # [checkpoint-named]
    assert TextTokenizer.load(write_tokenizer(tmp_path, **files)).eos_token_ids == expected


@pytest.mark.parametrize("eos", [10**6, -1, "two", [True]])
def test_impossible_eos_is_refused(tmp_path, eos):  # [checkpoint-named]
    with pytest.raises(CheckpointError, match="eos_token_id"):
        TextTokenizer.load(write_tokenizer(tmp_path, generation_config={"eos_token_id": eos}))


def test_missing_tokenizer_is_named(tmp_path):  # [checkpoint-named]
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json in"):
        TextTokenizer.load(tmp_path)


def edited(**changes: object) -> str:
    document = json.loads(tokenizer_document())
    for path, value in changes.items():
        target = document
        *parents, last = path.split("__")
        for parent in parents:
            target = target[parent]
        target[last] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param("", id="empty"),
        pytest.param("{", id="truncated"),
        pytest.param("[]", id="not an object"),
        pytest.param("{}", id="nothing in it"),
        pytest.param("[" * 10**5, id="nested"),
        pytest.param(edited(model__merges=[["q", "nowhere"]]), id="merge of unknown tokens"),
        pytest.param(edited(model__type="Magic"), id="unknown model"),
        pytest.param(edited(decoder={"type": "WordPiece", "prefix": "##", "cleanup": True}), id="wordpiece"),
        pytest.param(edited(decoder=None), id="no decoder"),
        pytest.param(edited(model__vocab={"a": 2**31}, model__merges=[], added_tokens=[]), id="absurd id"),
    ],
)
def test_broken_tokenizer_is_named(tmp_path, content):  # [checkpoint-named]
    (tmp_path / "tokenizer.json").write_text(content, "utf-8")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        TextTokenizer.load(tmp_path)


def test_tokenizer_unable_to_encode_special_text_is_rejected(tmp_path):
    words = {"type": "WordLevel", "vocab": {"<s>": 0, "?": 1}, "unk_token": "?"}
    content = edited(model=words, pre_tokenizer=None, added_tokens=[added_token(0, "<s>")])
    (tmp_path / "tokenizer.json").write_text(content, "utf-8")
    with pytest.raises(CheckpointError, match="forge"):
        TextTokenizer.load(tmp_path)


def test_leftover_truncation_does_not_shorten_prompts(tmp_path):
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(edited(truncation=truncation), "utf-8")
    assert len(TextTokenizer.load(tmp_path).encode("hello hello hello hello hello")) > 2


def test_sentencepiece_spelling_is_decoded(tmp_path):
    pieces = ["<unk>", "<0xE2>", "<0x82>", "<0xAC>", "▁", "a", "b", "▁a"]
    document = {
        **json.loads(tokenizer_document()),
        "model": {
            "type": "BPE",
            "vocab": {piece: i for i, piece in enumerate(pieces)},
            "merges": [["▁", "a"]],
            "unk_token": "<unk>",
            "byte_fallback": True,
        },
        "pre_tokenizer": None,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "added_tokens": [added_token(0, "<unk>")],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(document), "utf-8")
    tokenizer = TextTokenizer.load(tmp_path)
    ids = [7, 6, 1, 2, 3, 7]
    assert tokenizer.decode(ids) == Tokenizer.from_str(json.dumps(document)).decode(ids) == "ab€ a"


def added_token(token_id: int, content: str) -> dict:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, "special": True, **flags}


_shared: dict[tuple[Path, str], TextTokenizer] = {}


def shared(tmp_path_factory, *, chat_template: str = CHATML) -> TextTokenizer:
    """Hypothesis refuses function fixtures; one tokenizer for each template serves all examples."""
    key = (tmp_path_factory.getbasetemp(), chat_template)
    if key not in _shared:
        folder = key[0] / f"shared-tokenizer-{len(_shared)}"
        _shared[key] = TextTokenizer.load(write_tokenizer(folder, chat_template=chat_template))
    return _shared[key]
