"""What each family's tool calls are read as, in whole and in pieces."""

from random import Random

import pytest

from tandem_services.gateway.output.parts import CallArguments, CallBegin, Content, Reasoning, joined
from tandem_services.gateway.output.tool_parsers import harmony
from tandem_services.gateway.output.tool_parsers.json_calls import CallArray
from tandem_services.gateway.output.tool_parsers.registry import FAMILIES, detect_family

SCHEMAS = {
    "f": {"type": "object", "properties": {"a": {"type": "integer"}, "s": {"type": "string"}, "l": {"type": "array"}}},
    "g": {},
}


def new_parser(family: str):
    return CallArray() if family == "array" else FAMILIES[family].parser(SCHEMAS)


def read(family: str, *pieces: str):
    parser = new_parser(family)
    parts = [part for piece in pieces for part in parser.feed(piece)]
    return joined([*parts, *parser.finish()])


def call(index: int, name: str, arguments: str):
    return [CallBegin(index, name), CallArguments(index, arguments)]


OUTPUTS = [
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', call(0, "f", '{"a": 1}')),
    (
        "hermes",
        'Let me see.\n\n<tool_call>{"name":"f","arguments":{}}</tool_call>\n<tool_call>'
        '{"name":"g","arguments":{"s":"}"}}</tool_call>',
        [Content("Let me see."), *call(0, "f", "{}"), *call(1, "g", '{"s":"}"}')],
    ),
    (
        "hermes",
        '<tool_call>{"name":"f","arguments":{"s":"</tool_call> \\"{\\u00e9\\\\"}}</tool_call> done ',
        [*call(0, "f", '{"s":"</tool_call> \\"{\\u00e9\\\\"}'), Content(" done")],
    ),
    ("hermes", '<tool_call>{"arguments":{"a":1},"name":"f"}</tool_call>', call(0, "f", '{"a":1}')),
    ("hermes", '<tool_call>{"name":"f","arguments":"{\\"a\\":1}"}</tool_call>', call(0, "f", '{"a":1}')),
    ("hermes", '<tool_call>{"name":"f"}</tool_call>', call(0, "f", "{}")),
    ("hermes", '<tool_call>{"name":"f","arguments":null}</tool_call>', call(0, "f", "{}")),
    ("hermes", '<tool_call>{"name":"f","arguments":{"a":1</tool_call>x', [*call(0, "f", '{"a":1'), Content("x")]),
    ("hermes", "a <tool_call> b < c <tool_", [Content("a <tool_call> b < c <tool_")]),
    ("hermes", '<tool_call>{"city": 1}</tool_call>', [Content('<tool_call>{"city": 1}</tool_call>')]),
    ("hermes", 'x<tool_call>{"name": "f', [Content("x")]),
    ("hermes", 'x<tool_call>{"name": "f", "arguments": {"a', [Content("x"), *call(0, "f", '{"a')]),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', call(0, "f", '{"a": 1}')),
    ("llama3_json", ' <|python_tag|>{"name": "f", "parameters": {}}', call(0, "f", "{}")),
    (
        "llama3_json",
        '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
        [*call(0, "f", "{}"), *call(1, "g", "{}")],
    ),
    ("llama3_json", '{"name": "Bob", "age": 3}', [Content('{"name": "Bob", "age": 3}')]),
    ("llama3_json", '{"x": {"name": "f"}}', [Content('{"x": {"name": "f"}}')]),
    ("llama3_json", 'Use {"name": "f"}', [Content('Use {"name": "f"}')]),
    ("llama3_json", "<|python", [Content("<|python")]),
    (
        "mistral",
        'So:[TOOL_CALLS] [{"name": "f", "arguments": {"a": [1, 2]}}, {"name": "g", "arguments": {}}]',
        [Content("So:"), *call(0, "f", '{"a": [1, 2]}'), *call(1, "g", "{}")],
    ),
    (
        "mistral",
        '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]x1[ARGS]{}',
        [*call(0, "f", '{"a": 1}'), *call(1, "g", "{}")],
    ),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "f"}][TOOL_CALLS]g{}[TOOL_CALLS][{"name": "f"}]',
        [*call(0, "f", "{}"), *call(1, "g", "{}"), *call(2, "f", "{}")],
    ),
    ("mistral", '[TOOL_CALLS]f{"a": 1}', call(0, "f", '{"a": 1}')),
    ("mistral", "a list [1, 2] [TOOL", [Content("a list [1, 2] [TOOL")]),
    ("mistral", "[TOOL_CALLS]" + "x" * 300, [Content("[TOOL_CALLS]" + "x" * 300)]),
    ("mistral", "[TOOL_CALLS] I see none. ", [Content("[TOOL_CALLS] I see none. ")]),
    ("mistral", "[TOOL_CALLS]f[ARGS](1)", [Content("[TOOL_CALLS]f[ARGS](1)")]),
    ("mistral", "[TOOL_CALLS] [1, 2]", [Content("[TOOL_CALLS] [1, 2]")]),
    ("mistral", '[TOOL_CALLS][{"city": 1}] x', [Content('[TOOL_CALLS][{"city": 1}] x')]),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "f"}, {"city": 1}]',
        [*call(0, "f", "{}"), Content('{"city": 1}]')],
    ),
    ("mistral", "x[TOOL_CALLS]f[AR", [Content("x")]),
    ("mistral", '[TOOL_CALLS][{"name": "f', []),
    (
        "qwen3_coder",
        "Hm.\n<tool_call>\n<function=f>\n<parameter=a>\n7\n</parameter>\n<parameter=s>\none\n</x>\n\n</parameter>\n"
        "</function>\n</tool_call>",
        [Content("Hm."), *call(0, "f", '{"a": 7, "s": "one\\n</x>\\n"}')],
    ),
    (
        "qwen3_coder",
        "<function=f><parameter=l>[True, 'x']</parameter><parameter=a>seven</parameter></function>"
        "<tool_call><function=g></function></tool_call>bye",
        [*call(0, "f", '{"l": [true, "x"], "a": "seven"}'), *call(1, "g", "{}"), Content("bye")],
    ),
    ("qwen3_coder", "a <tool_call> b", [Content("a <tool_call> b")]),
    ("qwen3_coder", "<function=f>\n<parameter=s>\nab", call(0, "f", '{"s": "ab')),
    (
        "pythonic",
        "[f(a=1, s='x, ) \\'y', l=[1, {'b': None}]), g()]",
        [*call(0, "f", '{"a": 1, "s": "x, ) \'y", "l": [1, {"b": null}]}'), *call(1, "g", "{}")],
    ),
    ("pythonic", "<|python_start|>[f(3)]", call(0, "f", '{"a": 3}')),
    ("pythonic", "[f(a=__import__('os').getcwd())]", call(0, "f", '{"a": "__import__(\'os\').getcwd()"}')),
    ("pythonic", "[h(a=1)]", [Content("[h(a=1)]")]),
    ("pythonic", "[f, 2] and more", [Content("[f, 2] and more")]),
    ("pythonic", "hello [f(a=1)]", [Content("hello [f(a=1)]")]),
    (
        "openai",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>"
        'json<|message|>{"a": 1}<|call|>',
        [Reasoning("Hm."), *call(0, "f", '{"a": 1}')],
    ),
    (
        "openai",
        "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>analysis<|message|>B<|end|><|start|>"
        "assistant<|channel|>final<|message|>Yes <b>\n",
        [Reasoning("A\nB"), Content("Yes <b>\n")],
    ),
    (
        "openai",
        "<|channel|>commentary<|message|>Let me see.\n<|end|><|start|>assistant to=functions.f<|channel|>commentary"
        '<|constrain|>json<|message|> {"s": "<|x|>"}<|call|><|start|>assistant to=g<|channel|>analysis code<|message|>'
        "<|call|>",
        [Content("Let me see."), *call(0, "f", '{"s": "<|x|>"}'), *call(1, "g", "{}")],
    ),
    ("openai", " to=functions.f<|channel|>commentary json<|message|>{}", call(0, "f", "{}")),
    ("openai", "<|channel|>analysis to=python<|message|>1 + 1", [Reasoning("1 + 1")]),
    ("openai", "Yes to=functions.f <|e", [Content("Yes to=functions.f <|e")]),
    ("openai", "<|message|>Yes<|return|>", [Content("Yes")]),
    ("openai", "<|channel|>final", []),
    ("openai", '<|channel|>commentary to=functions.f<|message|>{"a', call(0, "f", '{"a')),
    ("openai", "<|channel|>" + "x" * 600, [Content("x" * 600)]),
    ("openai", "<|channel|>final<|message|>A<|channel|>final<|message|>B", [Content("A\nB")]),
    (
        "gemma4",
        '<|tool_call>call:f{a:7,s:<|"|>one "two" \\ }<|"|>}<tool_call|>',
        call(0, "f", '{"a": 7, "s": "one \\"two\\" \\\\ }"}'),
    ),
    (
        "gemma4",
        'Let me see.\n<|tool_call>call:f{l:[<|"|>x,]<|"|>,-1.5,true,None,{k:{},<|"|>q: r<|"|>:[]}]}<tool_call|>'
        "<|tool_call>call:g{}<tool_call|> done",
        [
            Content("Let me see."),
            *call(0, "f", '{"l": ["x,]", -1.5, true, null, {"k": {}, "q: r": []}]}'),
            *call(1, "g", "{}"),
            Content(" done"),
        ],
    ),
    (
        "gemma4",
        "<|tool_call>call:f{s:0123,l:0123,x:nan}<tool_call|>",
        call(0, "f", '{"s": "0123", "l": "0123", "x": "nan"}'),
    ),
    (
        "gemma4",
        '<|tool_call>call:f{"s": "a<tool_call|>\\u00e9", "l": [ 1 , 2 ]}<tool_call|>',
        call(0, "f", '{"s": "a<tool_call|>\\u00e9", "l": [1, 2]}'),
    ),
    ("gemma4", '<|tool_call>:f{s:<|"|>x<|"|>}<tool_call|>', call(0, "f", '{"s": "x"}')),
    (
        "gemma4",
        "<|tool_call>call:f{a:1,l:[{k<tool_call|>x",
        [*call(0, "f", '{"a": 1, "l": [{"k": null}]}'), Content("x")],
    ),
    (
        "gemma4",
        "<|tool_call>call:f{a,s:,l:[}}}<tool_call|>x",
        [*call(0, "f", '{"a": null, "s": null, "l": []}'), Content("x")],
    ),
    (
        "gemma4",
        "<|tool_call>call:f{a < b:1 < 2}<|tool_call>call:g{}",
        [*call(0, "f", '{"a < b": "1 < 2"}'), *call(1, "g", "{}")],
    ),
    ("gemma4", '<|tool_call>call:f{s:<|"|>ab<|', call(0, "f", '{"s": "ab')),
    ("gemma4", "<|tool_call>call:f{a:12", call(0, "f", '{"a": ')),
    ("gemma4", "a <|tool_call> b < c <|tool_", [Content("a <|tool_call> b < c <|tool_")]),
    ("gemma4", "<|tool_call>call:f(a=1)<tool_call|>", [Content("<|tool_call>call:f(a=1)<tool_call|>")]),
    ("gemma4", "x<|tool_call>call:f", [Content("x")]),
    ("array", '[{"name": "f", "arguments": {"a": 1}}]', call(0, "f", '{"a": 1}')),
    (
        "array",
        '[ {"name":"f","arguments":{}} ,\n{"name":"g","arguments":{"s":"]"}} ]',
        [*call(0, "f", "{}"), *call(1, "g", '{"s":"]"}')],
    ),
    ("array", '[{"na', []),
]
IDS = [f"{family}-{text[:40]}" for family, text, _ in OUTPUTS]


@pytest.mark.parametrize(("family", "text", "expected"), OUTPUTS, ids=IDS)
def test_output_is_read(family, text, expected):
    assert read(family, text) == expected


@pytest.mark.parametrize(("family", "text", "expected"), OUTPUTS, ids=IDS)
def test_cuts_mean_nothing(family, text, expected):
    assert read(family, *text) == expected
    for cut in range(len(text)):
        assert read(family, text[:cut], text[cut:]) == expected


PIECES = (
    *harmony.MARKERS,
    "assistant",
    " to=functions.f ",
    "to=g",
    "analysis",
    "final",
    "json",
    " ",
    "\n",
    "<|",
    '{"a": 1}',
)


def test_cuts_of_messages_in_any_order_mean_nothing():
    dice = Random(3)
    for _ in range(300):
        text = "".join(dice.choices(PIECES, k=dice.randint(1, 14)))
        whole = read("openai", text)
        assert read("openai", *text) == whole, text
        cut = dice.randint(0, len(text))
        assert read("openai", text[:cut], text[cut:]) == whole, (text, cut)


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", '<tool_call>{"name": "f"'),
        ("llama3_json", '{"name": "f"'),
        ("mistral", "[TOOL_CALLS]f[ARGS]{"),
        ("qwen3_coder", "<function=f>"),
        ("pythonic", "[f("),
        ("gemma4", "<|tool_call>call:f{"),
        ("openai", "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"),
        ("array", '[{"name":"f"'),
    ],
)
def test_call_begins_as_soon_as_its_name_is_complete(family, text):
    parser = new_parser(family)
    assert [part for character in text[:-1] for part in parser.feed(character)] == []
    assert parser.feed(text[-1])[0] == CallBegin(0, "f")


@pytest.mark.parametrize(
    ("family", "begin", "piece"),
    [
        ("hermes", '<tool_call>{"name":"f","arguments":{"s":"', "x"),
        ("llama3_json", '{"name":"f","parameters":{"s":"', "x"),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"s":"', "x"),
        ("qwen3_coder", "<function=f><parameter=s>", "x"),
        ("gemma4", '<|tool_call>call:f{l:[{k:<|"|>', "x"),
        ("gemma4", '<|tool_call>call:f{"s": "', "x"),
        ("openai", '<|channel|>commentary to=functions.f<|message|>{"s":"', "x"),
        ("array", '[{"name":"f","arguments":{"s":"', "x"),
    ],
)
def test_each_piece_of_a_string_argument_is_passed_on_at_once(family, begin, piece):
    parser = new_parser(family)
    parser.feed(begin)
    assert [parser.feed(piece) for _ in range(3)] == [[CallArguments(0, "x")]] * 3


@pytest.mark.timeout(60)
@pytest.mark.parametrize("family", [*FAMILIES, "array"])
@pytest.mark.parametrize(
    "text",
    [
        "<|start|>",
        "<|message|>",
        "<",
        "[",
        "{",
        '"',
        "(",
        "\\",
        "<tool_call>",
        "[TOOL_CALLS]",
        "[f(",
        '{"name":',
        "f(a=",
        "a:1,",
        "a:[{",
        '<|"|>',
        '"a" ',
    ],
)
def test_work_is_linear_in_what_a_model_writes(family, text):  # [linear-parsers]
    """Long outputs, in pieces larger than tokens: what is quadratic does not come to an end in the time a test has."""
    parser = new_parser(family)
    parser.feed({"pythonic": "[f(a=", "array": "[", "gemma4": "<|tool_call>call:f{a:["}.get(family, ""))
    fed = [part for _ in range(256) for part in parser.feed(text * (1024 // len(text)))]
    assert len(joined([*fed, *parser.finish()])) < 1 << 20


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("… <tool_call>\n<function=example> …", "qwen3_coder"),
        ("… <tool_call>\n{{ call | tojson }}\n</tool_call> …", "hermes"),
        ("[TOOL_CALLS] [", "mistral"),
        ("{{- '<|tool_call>call:' + function['name'] -}} {{ '<tool_response|>' }}", "gemma4"),
        ('{"name": function name, "parameters": dictionary}', "llama3_json"),
        ('<|start|>assistant<|channel|>analysis<|message|> "parameters"', "openai"),
        ('[func_name1(params_name1=params_value1)] {"parameters"', "pythonic"),
    ],
)
def test_family_is_known_by_its_template(template, family):
    assert detect_family(template).name == family


def test_template_without_calls_has_no_family():
    assert detect_family("{{ messages[0].content }}") is None
