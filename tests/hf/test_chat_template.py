"""Chat templates: where they are found, and errors with the template's file and line."""

import json

import pytest
from chat_tokenizer import CONVERSATION, write_chat_tokenizer

from lmtrain.hf.chat_template import TemplateError, find_template
from lmtrain.runtime.errors import UserError


def written(tmp_path, text):
    return find_template(str(write_chat_tokenizer(tmp_path, text)), None, "chat_template")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a\n{% for m in messages %}\n{{ m.content", 3),
        ("\n{{ messages|nothing }}", 2),
        ("{% for a in b %}" * 50 + "{% endfor %}" * 50, 1),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", 1),
    ],
)
def test_a_template_that_cannot_be_compiled_names_file_and_line(tmp_path, text, line):
    template = written(tmp_path, text)
    for fails in (template.check, lambda: template.render(CONVERSATION))[: min(line, 2)]:
        with pytest.raises(UserError, match=rf"^{tmp_path}/chat_template\.jinja:{line}: "):
            fails()


@pytest.mark.parametrize(
    ("file", "content"),
    [
        *(
            ("tokenizer_config.json", b'{"chat_template": [%s]}' % value)
            for value in (b'"a"', b'{"name": "x"}', b"null")
        ),
        ("chat_template.jinja", "{{ 'é' }}".encode("utf-16")),
    ],
)
def test_a_file_that_holds_no_template_is_an_error(tmp_path, file, content):
    folder = write_chat_tokenizer(tmp_path, None)
    (folder / file).write_bytes(content)
    with pytest.raises(UserError, match=file):
        find_template(str(folder), None, "chat_template")


def test_a_template_in_the_settings_is_named_with_its_own_line(tmp_path):
    folder = write_chat_tokenizer(tmp_path, None)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"chat_template": "a\n{{ 1 +"}))
    with pytest.raises(UserError, match=r"tokenizer_config\.json: chat_template, line 2"):
        find_template(str(folder), None, "chat_template").check()
    named = [{"name": "default", "template": "a"}, {"name": "other", "template": "{{ 1 +"}]
    path.write_text(json.dumps(settings | {"chat_template": named}))
    with pytest.raises(UserError, match=r"tokenizer_config\.json: chat_template other, line 1"):
        find_template(str(folder), "other", "chat_template").check()
    with pytest.raises(UserError, match=r"format\.chat_template, line 1"):
        find_template(str(folder), "{{ 1 +", "data.format.chat_template").check()


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("\n{{ 1/0 }}", 2, "division by zero"),
        ("\n\n{% for i in range(10**9) %}a{% endfor %}", 3, "Range too big"),
        ("{% macro f() %}\n{{ f() }}{% endmacro %}{{ f() }}", 2, "a macro"),
        ("\n{{ raise_exception('roles must alternate') }}", 2, "roles must alternate"),
    ],
)
def test_a_template_that_fails_is_named_with_its_line(tmp_path, text, line, words):
    with pytest.raises(TemplateError, match=rf"^{tmp_path}/chat_template\.jinja:{line}: {words}"):
        written(tmp_path, text).render(CONVERSATION)


def test_variables_do_not_replace_those_of_the_renderer(tmp_path):
    template = written(tmp_path, "{{ marks }}")
    assert template.render(CONVERSATION, variables={"marks": "a"}).text == "a"
    with pytest.raises(TemplateError, match="messages"):
        template.render(CONVERSATION, variables={"messages": []})
