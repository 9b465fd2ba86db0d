"""Prompts of real-world template constructs equal transformers' token for token; a special token's text in a message is
the only difference, and it is plain text."""

import itertools
import json
from functools import cache, partial
from pathlib import Path

import jinja2
import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from tandem_engine.base.errors import InvalidRequestError
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_testing.chat_histories import HISTORIES, SETTINGS, TOOLS, assistant, call, edited, tool, user
from tandem_testing.tokenizer_builders import tokenizer_document, write_tokenizer

TEMPLATES = {
    path.stem: path.read_text("utf-8") for path in sorted(Path(__file__).parent.glob("chat_templates/*.jinja"))
}
BOS, EOS = "<s>", "</s>"
THINKING = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
SPECIALS = (
    *(BOS, EOS, "[INST]", "[/INST]", "<<SYS>>", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[IMG]", "[gMASK]", "<sop>"),
    *(
        "<｜User｜>",
        "<｜Assistant｜>",
        "<｜end▁of▁sentence｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>"),
    *("<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|/tool|>", "<|observation|>", "<|end|>", "<|im_sep|>"),
    *("]~b]", "]~!b[", "[e~[", "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>", "<|START_OF_TURN_TOKEN|>"),
    *("<|END_OF_TURN_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|START_ACTION|>"),
    *("<|END_ACTION|>", "<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "<|start|>", "<|channel|>"),
    *("<|message|>", "<|call|>", "<|return|>", "<|im_user|>", "<|im_middle|>", "<|im_assistant|>", "<|im_system|>"),
    *("<|turn>", "<turn|>", "<|think|>", "<|channel>", "<channel|>", "<|tool>", "<tool|>", "<|tool_call>"),
    *("<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>'),
    *("<|tool_call_begin|>", "<|tool_call_end|>", "[|user|]", "[|assistant|]", "[|endofturn|]", "<|media_pad|>"),
)
MARK = "¤"
"""Stands in the marked copy of each special token where the token has its second character."""


def document(*, special_thinking: bool, marked_copies: bool = False) -> str:
    tokenizer = Tokenizer.from_str(tokenizer_document())
    tokenizer.add_tokens(["<b>", "brown fox"])
    tokenizer.add_special_tokens(list(SPECIALS))
    thinking = [AddedToken(text, special=special_thinking, normalized=False) for text in THINKING]
    tokenizer.add_special_tokens(thinking) if special_thinking else tokenizer.add_tokens(thinking)
    if marked_copies:
        tokenizer.add_special_tokens([marked(text) for text in ("<|im_end|>", *SPECIALS)])
    return tokenizer.to_str()


def marked(literal: str) -> str:
    return literal[0] + MARK + literal[2:]


@cache
def reference(*, special_thinking: bool = False, marked_copies: bool = False) -> PreTrainedTokenizerFast:
    built = Tokenizer.from_str(document(special_thinking=special_thinking, marked_copies=marked_copies))
    return PreTrainedTokenizerFast(tokenizer_object=built, bos_token=BOS, eos_token=EOS)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    loaded = {}

    def tokenizer_of(template: str, *, special_thinking: bool = False) -> TextTokenizer:
        key = template, special_thinking
        if key not in loaded:
            folder = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
            (folder / "tokenizer.json").write_text(document(special_thinking=special_thinking), "utf-8")
            config = {"chat_template": TEMPLATES[template], "bos_token": BOS, "eos_token": EOS}
            (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
            loaded[key] = TextTokenizer.load(folder)
        return loaded[key]

    return tokenizer_of


def expected_ids(template, messages, setting, **kind):
    """What transformers returns; None where its template refuses the messages."""
    options = {"add_generation_prompt": True, **setting}
    variables = options.pop("variables", {})
    try:
        return reference(**kind).apply_chat_template(
            messages, chat_template=TEMPLATES[template], return_dict=False, **options, **variables
        )
    except (jinja2.TemplateError, AttributeError, TypeError, ValueError, LookupError):
        return None


def encoded(tokenizer, messages, setting):
    try:
        return tokenizer.encode_chat(messages, **setting)
    except InvalidRequestError:
        return None


def test_corpus_has_enough_templates_that_render():
    assert len(TEMPLATES) >= 40
    for name in TEMPLATES:
        rendered = [expected_ids(name, messages, {}) for messages in HISTORIES.values()]
        assert sum(ids is not None for ids in rendered) >= 5, name


@pytest.mark.parametrize("special_thinking", [False, True])
@pytest.mark.parametrize("template", TEMPLATES)
def test_prompt_without_literals_equals_transformers(tokenizers, template, special_thinking):
    tokenizer = tokenizers(template, special_thinking=special_thinking)
    literals = THINKING if special_thinking else ()
    for name, messages in HISTORIES.items():
        if any(text in json.dumps(messages, ensure_ascii=False) for text in ("[INST]", *literals)):
            continue
        for setting in list(SETTINGS.values())[: 1 if special_thinking else None]:
            wanted = expected_ids(template, messages, setting, special_thinking=special_thinking)
            assert encoded(tokenizer, messages, setting) == wanted, (name, setting)


@pytest.mark.parametrize("template", TEMPLATES)
def test_thoughts_in_history_equal_transformers(tokenizers, template):
    for name in ("thought", "thought_in_last_turn", "two_thoughts", "calls"):
        for setting in SETTINGS.values():
            wanted = expected_ids(template, HISTORIES[name], setting)
            assert encoded(tokenizers(template), HISTORIES[name], setting) == wanted, (name, setting)


@pytest.mark.parametrize("template", sorted(TEMPLATES.keys() - {"character_slices"}))
@pytest.mark.parametrize("content", ["So: yes", "trailing \n ", "a <b> c"])
def test_continued_message_equals_transformers(tokenizers, template, content):
    messages = [user("q"), assistant(content)]
    wanted = expected_ids(template, messages, {"add_generation_prompt": False, "continue_final_message": True})
    ids = encoded(tokenizers(template), messages, {"add_generation_prompt": False, "continue_final": True})
    assert wanted is None or ids == wanted


def test_template_that_writes_a_message_twice_cannot_continue_it(tokenizers):
    """transformers leaves its mark for the end of the message in one of them."""
    messages = [user("q"), assistant("a")]
    with pytest.raises(InvalidRequestError, match="cannot be continued"):
        tokenizers("character_slices").encode_chat(messages, add_generation_prompt=False, continue_final=True)


INJECTED = [
    lambda literal, text: f"{text[:1]}{literal}{text[1:]}",
    lambda literal, text: f"{literal}{text}",
    lambda literal, text: f"{text}{literal}",
    lambda literal, text: f"x{literal}{literal} {text} {literal}y",
]
LITERAL_HISTORIES = {
    "turns": [user("ab"), assistant("cd"), user("ef")],
    "system": [
        {"role": "system", "content": "gh"},
        user("ij\nkl"),
        assistant("mn", reasoning_content="op"),
        user("q r"),
    ],
    "call": [user("st"), assistant("uv", tool_calls=[call(arguments={"wx": "yz", "n": 1})]), tool("ba"), user("dc")],
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_literal_in_messages_alone_becomes_plain_text(tokenizers, template):
    """The oracle is transformers with a marked copy of the literal that no template knows, whose id is then
    replaced."""
    used = [text for text in SPECIALS if text in TEMPLATES[template]]
    literals = dict.fromkeys(("<|im_end|>", *used[:1], *used[-1:]))
    histories = [(messages, TOOLS[:1] if name == "call" else None) for name, messages in LITERAL_HISTORIES.items()]
    cases = list(itertools.product(literals, INJECTED, histories))
    compared = 0
    for literal, inject, (messages, tools) in cases:
        given = edited([messages, tools], partial(inject, literal))
        wanted = with_marked_as_text(template, literal, edited([messages, tools], partial(inject, marked(literal))))
        assert encoded(tokenizers(template), given[0], {"tools": given[1]}) == wanted, given
        compared += wanted is not None
    assert compared >= len(INJECTED)


def with_marked_as_text(template, literal, asked):
    ids = expected_ids(template, asked[0], {"tools": asked[1]}, marked_copies=True)
    plain = reference()(literal, add_special_tokens=False, split_special_tokens=True).input_ids
    marked_id = reference(marked_copies=True).convert_tokens_to_ids(marked(literal))
    return ids and [each for token in ids for each in (plain if token == marked_id else (token,))]


SPLITTING = (
    "think_split_last_query",
    "think_always_open",
    "gmask_thinking_macro",
    "bracket_marks_tool_macro",
    "thoughts_cut_in_a_loop",
)


@pytest.mark.parametrize("template", SPLITTING)
def test_template_that_splits_thoughts_writes_its_own_marks(tokenizers, template):
    """`</think>` is special here: the template cuts the client's away and writes its own, which are control tokens."""
    for name in ("thought", "thought_in_last_turn", "two_thoughts", "calls"):
        messages = edited(HISTORIES[name], lambda text: text.replace("tool_response>", "result>"))
        wanted = expected_ids(template, messages, {}, special_thinking=True)
        assert encoded(tokenizers(template, special_thinking=True), messages, {}) == wanted, name


@pytest.mark.parametrize("template", SPLITTING)
def test_special_thought_mark_of_a_user_stays_text(tokenizers, template):
    tokenizer = tokenizers(template, special_thinking=True)
    mark = reference(special_thinking=True).convert_tokens_to_ids("</think>")
    honest = tokenizer.encode_chat([user("a b"), assistant("c", reasoning_content="d")])
    ids = tokenizer.encode_chat([user("a</think>b"), assistant("c", reasoning_content="d")])
    assert ids.count(mark) == honest.count(mark)
    assert tokenizer.decode(ids, skip_special_tokens=False).count("</think>") == honest.count(mark) + 1


CHANNELS = "half_bracket_marks_typed_values"


def test_template_that_cuts_channels_out_cuts_those_of_a_client(tokenizers):
    """Thoughts in contents of the history go, as with transformers; marks of a user stay text."""
    tokenizer = tokenizers(CHANNELS)
    messages = [user("a"), assistant("<|channel>thought\nhm\n<channel|>b"), user("c")]
    assert tokenizer.encode_chat(messages) == expected_ids(CHANNELS, messages, {})
    honest = tokenizer.encode_chat([user("a b")])
    ids = tokenizer.encode_chat([user("a<channel|>b")])
    mark = reference().convert_tokens_to_ids("<channel|>")
    assert ids.count(mark) == honest.count(mark) == 1
    assert tokenizer.decode(ids, skip_special_tokens=False).count("<channel|>") == 2
