"""ChatTemplate: what Hugging Face templates may do, and what no template may."""

import pytest

from tandem_engine.base.errors import CheckpointError, InvalidRequestError
from tandem_engine.tokenizer.chat_template import MAX_TEMPLATE_CHARACTERS, ChatTemplate

USER = [{"role": "user", "content": "<hi> & é"}]


def render(template: str, **variables: object) -> str:
    compiled = ChatTemplate(template, special_tokens={"bos_token": "<s>"}, source="x")
    return compiled.render(USER, add_generation_prompt=True, variables=variables)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].content }}", "<s><hi> & é"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "<hi> & é"}'),
        ("{% for m in messages %}\n    {{ m.role }}\n{% endfor %}", "    user\n"),
        ("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}", "1"),
        ("{% generation %}{{ messages[0].role }}{% endgeneration %}", "user"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ enable_thinking is defined }} {{ tools is none }}", "False True"),
        ("{% if add_generation_prompt %}yes{% endif %}", "yes"),
    ],
)
def test_templates_get_variables_of_hugging_face(template, expected):
    assert render(template) == expected


def test_template_kwargs_do_not_override_built_in_variables():
    assert render("{{ enable_thinking }} {{ messages | length }}", enable_thinking=False, messages=[]) == "False 1"


@pytest.mark.parametrize(
    ("template", "knows"),
    [("{% if tools %}{{ tools | tojson }}{% endif %}", True), ("{{ messages }}", False), ("tools", False)],
)
def test_template_reports_whether_it_renders_tools(template, knows):
    assert ChatTemplate(template, special_tokens={}, source="x").knows_tools is knows


def test_no_tools_are_none_and_a_variable_cannot_replace_them():
    template = ChatTemplate("{{ tools is none }} {{ tools | tojson }}", special_tokens={}, source="x")
    assert template.render(USER, add_generation_prompt=True, tools=[], variables={"tools": [1]}) == "True null"
    assert template.render(USER, add_generation_prompt=True, tools=[{"a": 1}]) == 'False [{"a": 1}]'


def test_template_can_refuse_messages():
    with pytest.raises(InvalidRequestError, match="refuses these messages: roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "template",
    [
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ messages[0].content.nope.nope }}",
        "{{ 1 + messages }}",
        "{{ 1 / 0 }}",
    ],
)
def test_hostile_or_broken_template_ends_in_a_clear_error(template):  # [template-sandboxed]
    with pytest.raises(InvalidRequestError, match="chat template"):
        render(template)


@pytest.mark.parametrize("template", ["{% for %}", "{{", "x" * (MAX_TEMPLATE_CHARACTERS + 1), "{% include 'x' %}{%"])
def test_template_that_is_no_template_is_refused_at_loading(template):  # [template-sandboxed]
    with pytest.raises(CheckpointError, match="tokenizer_config"):
        ChatTemplate(template, special_tokens={}, source="tokenizer_config.json")
