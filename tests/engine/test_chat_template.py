"""Chat templates: what they render, what they refuse, and that none runs away (DEFECTS d6, f1)."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from helpers.byte_tokenizer import BOS, CHAT_TEMPLATE, IM_END, IM_START, byte_tokenizer
from tierax.engine.chat_template import ChatTemplate, TemplateError

USER = [{"role": "user", "content": "hi"}]
PARTS_TEMPLATE = (
    "{% for m in messages %}{% for part in m['content'] %}"
    "{% if part['type'] == 'text' %}({{ part['text'] }}){% endif %}{% endfor %}{% endfor %}"
)
EITHER_TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}({{ part.text }}){% endfor %}{% endif %}{% endfor %}"
)


def render(source: str, messages: Any = USER, /, **options: Any) -> str:
    return ChatTemplate(source, "<s>", "</s>", now=lambda: datetime(2031, 2, 3)).render(messages, **options)


def test_a_conversation() -> None:
    messages = [*USER, {"role": "assistant", "content": "yes?"}, {"role": "user", "content": "bye"}]
    assert render(CHAT_TEMPLATE, messages) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes?<|im_end|>\n"
        "<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render(CHAT_TEMPLATE, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}|{{ eos_token }}", "<s>|</s>"),
        ("{{ {'b': '<é&\\'>', 'a': [1, none, true]} | tojson }}", '{"b": "<é&\'>", "a": [1, null, true]}'),
        ("{{ {'b': 1, 'a': 'é'} | tojson(sort_keys=true, ensure_ascii=true) }}", '{"a": "\\u00e9", "b": 1}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{{ {'a': 1, 'b': 2} | tojson(separators=(',', ':')) }}", '{"a":1,"b":2}'),
        ("{{ strftime_now('%d %b %Y') }}", "03 Feb 2031"),
        ("a\n  {% if true %}\nb\n  {% endif %}\nc", "a\nb\nc"),
        (
            "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}",
            "02",
        ),
        ("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}", "hi"),
        ("{% set x = 1 %}{% generation %}{% set x = 2 %}{% endgeneration %}{{ x }}", "1"),
        ("{{ undefined_thing }}{{ messages[0].nothing }}|", "|"),
        ("{{ tools is none }} {{ documents is none }}", "True True"),
        (
            "{% for i in [7, 8, 9] %}{{ loop.index }}/{{ loop.length }}{{ ';' if not loop.last }}{% endfor %}",
            "1/3;2/3;3/3",
        ),
        ("{% for i in [] %}x{% else %}none{% endfor %}", "none"),
        ("{% for i in 'abc' if i != 'b' %}{{ i ~ loop.index ~ none }}{% endfor %}", "a1Nonec2None"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}", "a1"),
        ("{% for n in [[1, [2]]] recursive %}{{ n if n is number else loop(n) }}{% endfor %}", "12"),
        (
            "{% macro f(x) %}<{{ x }}{{ caller() if caller }}>{% endmacro %}{{ f(1) }}{% call f(2) %}c{% endcall %}",
            "<1><2c>",
        ),
        (
            "{% set ns = namespace(t='') %}{% for m in messages %}{% set ns.t = ns.t + m.role %}{% endfor %}{{ ns.t }}",
            "user",
        ),
        (
            "{{ messages | map(attribute='role') | join(',') }} {{ 'a,b'.split(',')[-1] }} {{ 'x' * 3 }} {{ 7 % 4 }} {{ 2 ** 3 }}",
            "user b xxx 3 8",
        ),
        ("{{ '{0.__class__}'.format(messages) }}|", "|"),
        ("{% block b %}{{ messages[0].content }}{% endblock %}{{ self.b() }}", "hihi"),
    ],
)
def test_the_language_that_templates_use(source: str, text: str) -> None:
    assert render(source) == text


def test_variables_and_tools_reach_the_template() -> None:
    source = "{{ tools[0].function.name if tools }}{{ '/no_think' if enable_thinking is defined and not enable_thinking }}"
    assert render(source, tools=[{"function": {"name": "add"}}], enable_thinking=False) == "add/no_think"
    assert render(source) == ""


@pytest.mark.parametrize("name", ["messages", "bos_token", "eos_token"])
def test_variables_cannot_replace_the_prompt(name: str) -> None:
    with pytest.raises(TemplateError, match=f"{name} cannot be set"):
        render(CHAT_TEMPLATE, **{name: []})


@pytest.mark.parametrize("name", ["self", "where", "template"])
def test_any_other_name_is_a_variable(name: str) -> None:
    assert render("{{ messages[0].content }}", **{name: 1}) == render("{{ messages[0].content }}")


def test_text_parts_are_joined_or_passed_on() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert render("{{ messages[0].content }}", parts) == "a\nb"
    assert render(PARTS_TEMPLATE, parts) == "(a)(b)"
    assert render(EITHER_TEMPLATE, parts) == "(a)(b)"
    assert render(PARTS_TEMPLATE) == "(hi)"
    assert render(EITHER_TEMPLATE) == "hi"


@pytest.mark.parametrize("source", ["{{ messages[0].content }}", PARTS_TEMPLATE])
@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url", "image_url": {"url": "x"}}, r"messages\[0\].content\[0\].*'image_url'"),
        ({"text": "x"}, "type None"),
        ("x", "type None"),
        ({"type": "text"}, "needs a text"),
        ({"type": "text", "text": 5}, "needs a text"),
    ],
)
def test_other_parts_are_refused(source: str, part: Any, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        render(source, [{"role": "user", "content": [part]}])


@pytest.mark.parametrize(
    "messages",
    [[], ["hi"], [{"content": "x"}], [{"role": 1, "content": "x"}], [{"role": "user", "content": 5}]],
)
def test_broken_messages_are_refused(messages: Any) -> None:
    with pytest.raises(TemplateError, match="messages"):
        render(CHAT_TEMPLATE, messages)


def test_conversations_with_tools_have_a_template_of_their_own() -> None:
    template = ChatTemplate(
        "plain {{ messages[0].content }}", None, None, tool_use="{{ tools | tojson }}{{ x }}"
    )
    messages = [{"role": "user", "content": "hi"}]
    assert template.render(messages) == "plain hi"
    assert template.render(messages, tools=[]) == "plain hi"
    assert template.render(messages, tools=[{"type": "function"}], x=1) == '[{"type": "function"}]1'
    assert "tojson" in template.source
    with pytest.raises(TemplateError, match="line 1"):
        ChatTemplate("fine", None, None, tool_use="{% if %}")


def test_tool_arguments_are_objects_in_the_template() -> None:
    source = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"

    def call(arguments: Any) -> list[dict[str, Any]]:
        return [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
            }
        ]

    assert render(source, call('{"a":1}')) == '{"a": 1}'
    assert render(source, call({"a": 1})) == '{"a": 1}'
    assert render(source, call("broken")) == '"broken"'


def test_the_final_message_can_be_continued() -> None:
    messages = [*USER, {"role": "assistant", "content": "Sure, hi "}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    start = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert render(CHAT_TEMPLATE, messages, **options) == start + "Sure, hi "
    trimming = CHAT_TEMPLATE.replace("message['content']", "message['content'] | trim")
    assert render(trimming, messages, **options) == start + "Sure, hi"
    parts = [*USER, {"role": "assistant", "content": [{"type": "text", "text": "a"}]}]
    assert render(PARTS_TEMPLATE, parts, **options) == "(hi)(a"
    with pytest.raises(TemplateError, match="exclude"):
        render(CHAT_TEMPLATE, messages, continue_final_message=True)
    with pytest.raises(TemplateError, match="does not write the last message"):
        render("{{ messages[0].content }}", messages, **options)
    with pytest.raises(TemplateError, match="needs a last message with text"):
        render(CHAT_TEMPLATE, [{"role": "assistant", "content": None}], **options)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('System role not supported') }}", "^System role not supported$"),
        ("{{ messages[9].role }}", "has no element 9"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% for x in 5 %}{% endfor %}", "not iterable"),
        ("{% include 'other' %}", "failed"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0].update(role='system') }}", "unsafe"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    ],
)
def test_errors_carry_the_templates_words(source: str, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        render(source)


@pytest.mark.parametrize("source", ["{% if %}", "{{ 'a }}", "{% for x in y %}", "{% nonsense %}"])
def test_bad_syntax_is_found_when_the_template_is_loaded(source: str) -> None:
    with pytest.raises(TemplateError, match=r"not valid Jinja \(line 1\)"):
        ChatTemplate(source, None, None)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}", "runs away"),
        ("{{ range(10 ** 9) | list }}", "Range too big"),
        ("{{ 'x' * 10 ** 9 }}", "repeats"),
        ("{{ 10 ** 9 * [1] }}", "repeats"),
        ("{{ 9 ** 9 ** 9 ** 9 ** 9 }}", "number of more than"),
        ("{{ 9 ** (9 ** 9) }}", "power"),
        (
            "{% set n = namespace(x=9) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
            "number of",
        ),
        (
            "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
            "longer than",
        ),
        (
            "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
            "longer than",
        ),
        ("{{ 'x' | center(10 ** 9) }}", "width"),
        ("{{ 'x'.ljust(10 ** 9) }}", "width"),
        ("{% set s %}{% for i in range(90000) %}{{ 'x' * 9000 }}{% endfor %}{% endset %}", "writes more"),
        ("{% for i in range(90000) %}" + "x" * 900 + "{% endfor %}", "writes more"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{% block b %}{{ self.b() }}{% endblock %}", "RecursionError"),
    ],
)
def test_runaway_templates_end_with_an_error(source: str, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        render(source)


def test_each_rendering_has_a_budget_of_its_own() -> None:
    template = ChatTemplate("{% for i in range(90000) %}{% endfor %}ok", None, None)
    assert {template.render(USER) for _ in range(8)} == {"ok"}


def test_a_templated_prompt_has_the_bos_that_the_template_writes() -> None:
    for add_bos in (True, False):
        tokenizer = byte_tokenizer(add_bos=add_bos, chat_template="{{ bos_token }}" + CHAT_TEMPLATE)
        template = ChatTemplate(tokenizer.chat_template or "", tokenizer.bos_token, tokenizer.eos_token)
        ids = tokenizer.encode(template.render(USER), add_bos=False)
        assert ids[:2] == [BOS, IM_START]
        assert ids.count(BOS) == 1
        # A client that renders by itself and sends the text as a raw prompt gets the same ids.
        assert tokenizer.encode(template.render(USER), add_bos=tokenizer.add_bos) == ids
        plain = ChatTemplate(CHAT_TEMPLATE, tokenizer.bos_token, tokenizer.eos_token)
        assert tokenizer.encode(plain.render(USER), add_bos=False)[0] == IM_START
    assert byte_tokenizer(add_bos=True).encode("hi", add_bos=True) == [BOS, *b"hi"]


def test_special_tokens_of_the_template_are_single_ids() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(render(CHAT_TEMPLATE, add_generation_prompt=False), add_bos=False)
    assert ids == [IM_START, *b"user\nhi", IM_END, ord("\n")]
