"""Reasoning apart from the answer, opened by model or template."""

import pytest

from tandem_services.gateway.output.parts import Content, Reasoning, joined
from tandem_services.gateway.output.reader import OutputReading
from tandem_services.gateway.output.reasoning import STYLES, detect_reasoning


def read(style: str, text: str, *, opened: bool = False, **fields):
    reading = OutputReading(reasoning=STYLES[style], opened=opened, **fields)
    outputs = []
    for pieces in ([text], text):
        reader = reading.new_reader()
        parts = [part for piece in pieces for part in reader.feed(piece)]
        outputs.append(joined([*parts, *reader.finish()]))
    assert outputs[0] == outputs[1]
    return outputs[0]


@pytest.mark.parametrize(
    ("style", "opened", "text", "expected"),
    [
        ("qwen3", False, "<think>\nWell.\n</think>\n\nYes", [Reasoning("Well."), Content("Yes")]),
        ("qwen3", True, "Well.\n\nOr not.\n</think>\n\nYes\n", [Reasoning("Well.\n\nOr not."), Content("Yes\n")]),
        ("qwen3", False, "Yes </think> no", [Content("Yes </think> no")]),
        ("qwen3", False, " \n<think></think>Yes", [Content("Yes")]),
        ("qwen3", False, "\n Yes <think>", [Content("\n Yes <think>")]),
        ("qwen3", True, "cut off </th", [Reasoning("cut off </th")]),
        ("qwen3", False, "<thi", [Content("<thi")]),
        ("deepseek_r1", True, "Well.</think>Yes", [Reasoning("Well."), Content("Yes")]),
        ("deepseek_r1", True, "<think>\nWell.\n</think>\nYes", [Reasoning("Well."), Content("Yes")]),
        ("deepseek_r1", True, "<think><think>a", [Reasoning("<think>a")]),
        ("deepseek_r1", True, "never ends ", [Reasoning("never ends")]),
        ("mistral", False, "[THINK]Well.[/THINK]Yes", [Reasoning("Well."), Content("Yes")]),
    ],
)
def test_reasoning_is_cut_from_the_answer(style, opened, text, expected):
    assert read(style, text, opened=opened) == expected


def test_hidden_reasoning_is_omitted():
    assert read("qwen3", "<think>Well.</think>Yes", shows_reasoning=False) == [Content("Yes")]


@pytest.mark.parametrize(
    ("style", "prompt", "opened"),
    [
        ("qwen3", "…<|im_start|>assistant\n", False),
        ("qwen3", "…<|im_start|>assistant\n<think>\n", True),
        ("qwen3", "…<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("deepseek_r1", "…<｜Assistant｜>", True),
        ("deepseek_r1", "…<｜Assistant｜><think>\n", True),
        ("deepseek_r1", "…<｜Assistant｜></think>", False),
    ],
)
def test_prompt_tells_whether_reasoning_has_begun(style, prompt, opened):
    assert STYLES[style].opened(prompt) is opened


@pytest.mark.parametrize(
    ("template", "style"),
    [
        ("a<｜Assistant｜>b</think>", "deepseek_r1"),
        ("{{ content.split('</think>') }}", "qwen3"),
        ("[THINK]{{ x }}[/THINK]", "mistral"),
        ("<|start|>assistant<|channel|>analysis<|message|>{{ thinking }}", "openai_gptoss"),
    ],
)
def test_style_is_known_by_its_template(template, style):
    assert detect_reasoning(template) is STYLES[style]


def test_most_templates_do_not_reason():
    assert detect_reasoning("{{ messages }}") is None
