"""A template renders what Hugging Face's does, and neither harm nor chance comes from one."""

import datetime
import json

import pytest

from models.chat_template import MAX_ITERATIONS, TODAY, ChatTemplate, TemplateError

HELLO = [{"role": "user", "content": "Hello <b>"}]


def render(source: str, messages=HELLO, **options) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, **options)


def test_messages_special_tokens_and_the_generation_prompt_are_given():
    source = ("{{ bos_token }}{% for m in messages %}[{{ m.role }}|{{ m['content'] }}]{% endfor %}"
              "{% if add_generation_prompt %}>{% endif %}")
    messages = [*HELLO, {"role": "assistant", "content": "é"}]
    assert render(source, messages) == "<s>[user|Hello <b>][assistant|é]>"
    assert render(source, messages, add_generation_prompt=False) == "<s>[user|Hello <b>][assistant|é]"


def test_blocks_leave_no_white_space():
    assert render("{% for m in messages %}\n    {% if true %}\nx\n    {% endif %}\n{% endfor %}\n") == "x\n"


def test_what_templates_rely_on_is_there():
    source = ("{% for n in range(9) %}{% if n == 1 %}{% continue %}{% elif n == 3 %}{% break %}{% endif %}{{ n }}{% endfor %}"
              "{% set ns = namespace(n=1) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}"
              "{% generation %}{{ '-' * 3 ~ 7 % 4 }}{% endgeneration %}{{ messages[0].content.split('<')[0] | trim }}"
              "{{ tools is none }}{{ documents is none }}{% macro f(x) %}({{ x }}){% endmacro %}{{ f(1) }}"
              "{% for x in [1, 2] %}{{ loop.index0 }}{{ loop.last }}{{ loop.length }}{% endfor %}{{ messages[::-1] | length }}")
    assert render(source) == "022---3HelloTrueTrue(1)0False21True21"


def test_json_is_as_hugging_face_writes_it():
    value = {"b": "<é'&>", "a": [1, None]}
    assert render("{{ {'b': \"<é'&>\", 'a': [1, none]} | tojson }}") == json.dumps(value, ensure_ascii=False)
    assert render("{{ {'a': [1]} | tojson(indent=2) }}") == json.dumps({"a": [1]}, indent=2)


def test_the_day_is_always_the_same_and_asking_for_it_is_noticed():
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", {})
    assert not template.asked_for_date
    assert template.render(HELLO) == f"{TODAY:%d %b %Y}" != f"{datetime.date.today():%d %b %Y}"
    assert template.asked_for_date


@pytest.mark.parametrize("source", ["{% if %}", "{{ 'a", "{% for x in y %}", "{{ x | nonsense }}", "{{ [1, 2] | random }}",
                                    "{{ 'x' | center(1000000000) }}", "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}"])
def test_what_is_no_template_is_refused_in_one_line(source):
    with pytest.raises(TemplateError, match="^the chat template is no jinja template: [^\n]*; repair it$"):
        ChatTemplate(source, {})


@pytest.mark.parametrize(("source", "reason"), [
    ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe"),
    ("{{ messages.__class__.__base__.__subclasses__() }}", "unsafe"),
    ("{{ raise_exception.__globals__.os }}", "unsafe"),
    ("{{ messages | map(attribute='__class__.__mro__') | list }}", "unsafe"),
    ("{{ messages.append(1) }}", "unsafe"),
    ("{% for x in range(10**9) %}{% endfor %}", "Range too big"),
    ("{% for x in range(99999) %}{% for y in range(99999) %}{% endfor %}{% endfor %}", f"more than {MAX_ITERATIONS} iterations"),
    ("{% set xs = range(9999) | list %}{% for x in xs %}{% for y in xs %}x{% endfor %}{% endfor %}", "iterations"),
    ("{% macro f(n) %}{{ f(n - 1) if n else '' }}{{ f(n - 1) if n else '' }}{% endmacro %}{{ f(40) }}", "iterations and calls"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ("{% for x in range(99999) %}{{ '0123456789' * 10 }}{% endfor %}", "more than 4000000 characters"),
    ("{{ 'x' * 10**10 }}", "characters"),
    ("{{ 'x' * 4000001 }}", "characters"),
    ("{{ 4000001 * 'x' }}", "wanted small numbers"),
    ("{{ 9 ** 9 ** 9 }}", "wanted small numbers|a power of"),
    ("{% set ns = namespace(x='x') %}{% for n in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}", "characters"),
    ("{% set ns = namespace(x='x') %}{% for n in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}", "characters"),
    ("{{ '%999999999d' % 1 }}", "wanted small numbers"),
    ("{{ '{:>999999999}'.format(1) }}", "unsafe"),
    ("{{ 'x'.ljust(999999999) }}", "unsafe"),
    ("{{ {} | tojson(indent=999999999) }}", "an indent of 999999999"),
    ("{{ nothing.at.all }}", "'nothing' is undefined"),
    ("{% include 'other' %}", "no loader"),
    ("{{ raise_exception('No\nsystem ' + 'x' * 999) }}", "No system xxx"),
])  # fmt: skip
def test_harm_is_refused_in_one_short_line(source, reason):
    with pytest.raises(TemplateError, match=reason) as caught:
        render(source)
    message = str(caught.value)
    assert message.startswith("the chat template did not render 1 messages (user): ")
    assert "\n" not in message and len(message) < 400


def test_a_rendering_leaves_nothing_for_the_next():
    template = ChatTemplate("{% for n in range(99000) %}{% endfor %}{{ messages | length }}", {})
    assert [template.render(HELLO) for _ in range(4)] == ["1"] * 4
