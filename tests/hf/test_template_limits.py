"""Limits of chat templates: same texts as without limits, and errors with the line for endless and too large ones."""

import threading

import pytest
from chat_tokenizer import CONVERSATION, MARKED
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils

from lmtrain.hf import template_limits
from lmtrain.hf.chat_template import ChatTemplate
from lmtrain.runtime.errors import UserError

TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {"city": {"type": "string"}, "days": [1, 2]}}}
]
FEATURES = [
    MARKED,
    "{% for m in messages %}{{ loop.index0 % 2 }}{{ loop.last }}{{ loop.length - loop.revindex0 }}{% endfor %}",
    "{% for m in messages if m.role == 'user' %}{{ loop.previtem is defined ~ m.content ~ loop.index }}{% endfor %}",
    "{% for m in messages[::-1] %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m['content'][1:-1] }}{% endfor %}",
    "{% for m in nothing %}{{ m }}{% else %}{{ 'none' ~ nothing }}{% endfor %}",
    "{% for key, value in messages[0].items() %}{{ key + '=' + value + '\n' }}{% endfor %}",
    "{% for t in tools recursive %}{{ loop(t.values()) if t is mapping else t|string }}{% endfor %}",
    "{{ tools|tojson }}{{ tools|tojson(indent=2) }}{{ tools }}{{ messages|length * 3 + 2 ** 5 }}{{ 'ab' * 2 }}",
    "{% macro say(m) %}{{ caller() }}{{ m.content|trim|upper }}{% endmacro %}"
    "{% for m in messages %}{% call say(m) %}>{% endcall %}{% endfor %}",
    "{% set ns = namespace(text='') %}{% for m in messages %}{% set ns.text = ns.text + m.content + '\n' %}{% endfor %}"
    "{{ ns.text }}{{ '%s and %5d|%.2f' % ('a', 3, 1.5) }}{{ '{:>4}|{!r}'.format(3, 'x') }}{{ '%s'|format(bos_token) }}",
    "{% set roles = messages|map(attribute='role')|list %}{{ roles|join(', ') }}{{ '-'.join(roles) }}"
    "{{ [1, 2.5]|sum }}{{ roles|unique|sort|list }}{{ messages|selectattr('role', 'eq', 'user')|list|length }}"
    "{{ messages|groupby('role')|map('first')|list }}{{ [messages]|sum(start=[])|length }}",
    "{{ messages[1].content.replace('a', 'bb')|replace('b', 'a')|indent(2) }}{{ 'x'.center(5)|center(9) }}"
    "{{ messages[1].content.split(' ')|batch(2)|list }}{{ 'a\tb'.expandtabs(4) }}{{ 3.14159|round(2) }}{{ 7 // 2 }}",
    "{% set text %}{% for i in range(3) %}{{ i }},{% endfor %}{% endset %}{{ text }}{% filter upper %}a{% endfilter %}",
    "{{ nothing|default('d') }}{{ nothing }}{{ none }}{{ true }}{{ {'a': [1, (2, 3)]} }}{{ dict(a=1)|items|list }}",
]


def written(text):
    return ChatTemplate(text, (("bos_token", "<s>"),), "chat.jinja:")


@pytest.mark.parametrize(("text", "prompt"), [(MARKED, False), *((text, True) for text in FEATURES)])
def test_limits_change_no_text(monkeypatch, text, prompt):
    found = written(text).render(CONVERSATION, TOOLS, add_generation_prompt=prompt)
    monkeypatch.setattr(chat_template_utils, "ImmutableSandboxedEnvironment", ImmutableSandboxedEnvironment)
    chat_template_utils._compile_jinja_template.cache_clear()
    theirs = chat_template_utils.render_jinja_template(
        [CONVERSATION],
        tools=TOOLS,
        chat_template=text,
        return_assistant_tokens_mask="generation" in text,
        add_generation_prompt=prompt,
        bos_token="<s>",
    )
    chat_template_utils._compile_jinja_template.cache_clear()
    assert found.text == theirs[0][0]
    assert len(found.text) > 3
    assert list(found.generated) == (theirs[1][0] if "generation" in text else [])


def test_a_large_conversation_is_written_while_another_thread_uses_more_memory_than_a_template_may(monkeypatch):
    monkeypatch.setattr(template_limits, "MAX_BYTES", 64 << 20)
    turns = [{"role": role, "content": "a " * 5000} for role in ("user", "assistant")] * 50
    made = []
    other = threading.Thread(target=lambda: made.append(len(bytearray(100 << 20))))
    other.start()
    assert len(written(MARKED).render(turns).text) > 1_000_000
    other.join()
    assert made


NESTED = "{% set a = ['x', 'y'] %}" + "{% set a = [a, a, a, a, a, a, a, a, a, a] %}" * 12
DOUBLED = [
    *("ns.x + ns.x", "ns.x ~ ns.x", "[ns.x, ns.x]|join", "ns.x|replace('a', ns.x)", "ns.x.replace('a', ns.x)"),
    *("'%s%s' % (ns.x, ns.x)", "'{}{}'.format(ns.x, ns.x)", "ns.x.join([ns.x, ns.x])"),
    "ns.x.translate({97: ns.x})",
]
WIDE = [
    *("'a' * 10**10", "10000000000 * 'a'", "[1] * 10**10", "'a'|center(10000000000)", "'a'.ljust(10**10)"),
    *("'a\\n\\nb'|indent(10**10)", "'%9999999999d' % 3", "'%9999999999d'|format(3)", "'{:9999999999d}'.format(3)"),
    *("'{:{}d}'.format(3, 10**10)", "messages|tojson(indent=10**10)", "'abc'|batch(10**10, 'x')|list"),
    *("[range(99999)|list]|list * 999", "range(99999)|map('string')|join('x' * 9999)"),
    "('a' * 9999)|join('x' * 9999)",
]
GROW = "{%% set ns = namespace(x='abc') %%}{%% for i in range(99) %%}\n{%% set ns.x = %s %%}{%% endfor %%}"


@pytest.mark.parametrize(
    "text",
    [
        *(f"\n{{{{ {wide} }}}}" for wide in WIDE),
        *(f"{NESTED}\n{{{{ {nested} }}}}" for nested in ("a", "a|tojson", "a|string", "'a' ~ a", "[a]|join")),
        "{% for i in range(99999) %}\n{% for j in range(99) %}abcdefghij{% endfor %}{% endfor %}",
        "{% set x %}{% for i in range(99999) %}\n{% for j in range(999) %}{{ i }}{% endfor %}{% endfor %}{% endset %}",
        *(GROW % grown for grown in DOUBLED),
        "{% set a = 'x' * 9999 %}{% set ns = namespace(x=[]) %}\n{% for i in range(99999) %}"
        "{% set ns.x = [ns.x, a[1:]] %}{% endfor %}",
    ],
)
def test_huge_texts_end_with_the_line(monkeypatch, text):
    monkeypatch.setattr(template_limits, "MAX_BYTES", 32 << 20)
    with pytest.raises(UserError, match=r"^chat\.jinja:2: .*32 MiB"):
        written(text).render(CONVERSATION)


@pytest.mark.parametrize(
    "text",
    [
        "{% for i in range(99999) %}\n{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% set a = range(99999)|list %}{% for i in a %}\n{% for j in a[1:] %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}\n{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
)
def test_the_time_of_a_conversation_is_limited(monkeypatch, text):
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.2)
    template = written(text)
    for _ in range(2):  # each has its own time
        with pytest.raises(UserError, match=r"chat\.jinja:\d: .* 0\.2 s"):
            template.render(CONVERSATION)


@pytest.mark.parametrize(
    "text", ["10 ** 10000000000", "(10 ** 9999) * (10 ** 9999)", "3.14|round(10000000000, 'ceil')"]
)
def test_large_integers_are_refused(text):
    with pytest.raises(UserError, match=r"chat\.jinja:2: .* (65,536 bits|10000000000 digits)"):
        written(f"\n{{{{ {text} }}}}").render(CONVERSATION)
