"""YAML files: values, lines, includes, merges and errors."""

import os

import fsspec
import pytest

from lmtrain.config.yaml_loader import load_file, parse_value
from lmtrain.runtime.errors import UserError


@pytest.fixture
def load(tmp_path, monkeypatch):
    """`load(text, name=text, ...)` writes main.yaml and other files, and loads main.yaml."""
    monkeypatch.chdir(tmp_path)

    def write_and_load(text, **others):
        for name, content in {"main": text, **others}.items():
            path = tmp_path / (name.replace("__", "/") + ".yaml")
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return load_file("main.yaml")

    return write_and_load


def problem(load, text, **others):
    with pytest.raises(UserError) as caught:
        load(text, **others)
    return str(caught.value)


@pytest.mark.parametrize(
    ("written", "value"),
    [("6E-4", 6e-4), (".inf", float("inf")), ("", None), ("[1, {b: 2}]", [1, {"b": 2}]), ("010", 10), ("1:30", "1:30")],
)
def test_values_follow_yaml_1_2(load, written, value):
    read = load(f"a: {written}\n").data["a"]
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize("text", ["", "---\n", "\ufeff"])
def test_an_empty_file_is_an_empty_layer(load, text):
    assert load(text).data == {}


def test_every_value_has_its_line(load):
    layer = load("a:\n  b: 1\n\n  c:\n    - 2\n    - d: 3\n\n      e: 4\nf: {g: 5}\n")
    lines = {path: origin.line for path, origin in layer.origins.items()}
    assert lines == {
        ("a",): 1,
        ("a", "b"): 2,
        ("a", "c"): 4,
        ("a", "c", 0): 5,
        ("a", "c", 1): 6,
        ("a", "c", 1, "d"): 6,
        ("a", "c", 1, "e"): 8,
        ("f",): 9,
        ("f", "g"): 9,
    }
    assert {origin.source for origin in layer.origins.values()} == {"main.yaml"}


@pytest.mark.parametrize(
    ("text", "others", "data"),
    [
        # any value may be an include, several times, relative to the including file
        ("a: !include sub/o.yaml\n", {"sub__o": "b: !include p.yaml\n", "sub__p": "c: 3\n"}, {"a": {"b": {"c": 3}}}),
        # a merge key adds defaults, of which the earlier entry of a list wins, at any position
        ("s:\n  <<: !include o.yaml\n  b: 20\n", {"o": "a: 1\nb: 2\n"}, {"s": {"a": 1, "b": 20}}),
        ("s:\n  x: 0\n  <<: [{x: 1, y: 1}, {y: 2, z: 2}]\n", {}, {"s": {"x": 0, "y": 1, "z": 2}}),
        ("<<: !include o.yaml\na: {c: 3}\n", {"o": "a: {b: 1, c: 2}\n"}, {"a": {"b": 1, "c": 3}}),
        # an unindented include has a lower priority than the file, and the last one wins
        ("!include o.yaml  # base\na: {b: 10}\n", {"o": "a: {b: 1, c: 2}\n"}, {"a": {"b": 10, "c": 2}}),
        ("!include o.yaml\n!include p.yaml\n", {"o": "a: 1\nb: 1\n", "p": "b: 2\n"}, {"a": 1, "b": 2}),
        ("s: !include o.yaml\n", {"o": "!include p.yaml\na: 1\n", "p": "a: 2\nb: 3\n"}, {"s": {"a": 1, "b": 3}}),
        ("a: |\n  !include o.yaml\n", {}, {"a": "!include o.yaml\n"}),
    ],
)
def test_includes_and_merges(load, text, others, data):
    assert load(text, **others).data == data


@pytest.mark.parametrize(
    ("text", "others", "path", "origin"),
    [
        ("x: 0\na: !include sub/o.yaml\n", {"sub__o": "\nb: 1\n"}, ("a", "b"), "sub/o.yaml:2"),
        ("s:\n  <<: !include o.yaml\n  b: 2\n", {"o": "a: 1\nb: 2\nc: {d: 3}\n"}, ("s", "c", "d"), "o.yaml:3"),
        ("s:\n  <<: [{s: 1}, {\n    c: 4}]\n", {}, ("s", "c"), "main.yaml:3"),
        ("!include o.yaml\na: {b: 10}\n", {"o": "a: {b: 1, c: 2}\n"}, ("a", "b"), "main.yaml:2"),
        ("!include o.yaml\na: {b: 10}\n", {"o": "a: {b: 1, c: 2}\n"}, ("a", "c"), "o.yaml:1"),
    ],
)
def test_values_of_includes_and_merges_have_their_lines(load, text, others, path, origin):
    assert str(load(text, **others).origin_of(path)) == origin


@pytest.mark.parametrize(
    ("text", "other", "message"),
    [
        ("x: 1\na: !include gone.yaml\n", "", "gone.yaml: no such file (included from main.yaml:2)"),
        ("a: !include o.yaml\n", "b: 1\nb: 2\n", "o.yaml:2: duplicate key 'b'"),
        ("a: !include o.yaml\n", "b: !include main.yaml\n", "circular !include: main.yaml:1 -> o.yaml:1 -> main.yaml"),
        ("!include o.yaml\na: 1\n", "- 1\n", "o.yaml:1: expected a map of settings"),
        ("!include o.yaml\na: 1\na: 2\n", "", "main.yaml:3: duplicate key 'a'"),
    ],
)
def test_an_invalid_include_is_an_error_with_both_places(load, text, other, message):
    assert problem(load, text, o=other).startswith(message)


def test_files_at_urls_include_files_relative_to_them():
    with fsspec.open("memory://configs/main.yaml", "w") as file:
        file.write("a: !include part.yaml\n")
    with fsspec.open("memory://configs/part.yaml", "w") as file:
        file.write("b: 1\n")
    layer = load_file("memory://configs/main.yaml")
    assert layer.data == {"a": {"b": 1}}
    assert str(layer.origin_of(("a", "b"))) == "memory://configs/part.yaml:1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\nabc\n", "main.yaml:2: "),
        ("a:\n\tb: 1\n", "main.yaml:2: this is not valid YAML: a tab"),
        ("a: *x\n", "main.yaml:1: "),
        ("a: 1\n---\nb: 2\n", "main.yaml:2: "),
        ("a:\n  b: 1\n  b: 1\n", "main.yaml:3: duplicate key 'b'; first set at main.yaml:2"),
        ("on: 1\n", "main.yaml:1: "),
        ("=: 1\n", "main.yaml:1: "),
        ("? [a]\n: 1\n", "main.yaml:1: "),
        ("a:\n  <<: 3\n", "main.yaml:2: "),
        ("a: !include [b]\n", "main.yaml:1: "),
        ("a:\n  b: !inculde x.yaml\n", "main.yaml:2: "),
        ("a: !!python/name:os.getcwd ''\n", "main.yaml:1: "),
        ("a: 2026-99-99\n", "main.yaml:1: "),
        ("a: &x\n  b: *x\n", "main.yaml:"),
        ("a: " + "[" * 2000 + "]" * 2000, "main.yaml"),
    ],
)
def test_an_invalid_file_is_a_user_error_with_its_line(load, text, message):
    assert problem(load, text).startswith(message)


def test_aliases_of_aliases_do_not_exhaust_the_memory(load):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)]
    assert "main.yaml:1: " in problem(load, "".join(lines))


def test_a_byte_order_mark_is_no_part_of_a_file(load):
    mark = b"\xef\xbb\xbf"
    layer = load(mark + b"!include part.yaml\na: 1\n", part=(mark + b"{b: 2}\n").decode())
    assert layer.data == {"a": 1, "b": 2}
    assert str(layer.origin_of(("a",))) == "main.yaml:2"


@pytest.mark.parametrize("text", ["!include {}.yaml\n", "k: !include {}.yaml\n"])
def test_includes_are_bounded_in_depth_and_number(load, text):
    deep = {f"x{n}": text.format(f"x{n + 1}") for n in range(2000)}
    assert problem(load, text.format("x0"), **deep).startswith("x19.yaml:1: an !include 20 files deep")
    wide = {f"x{n}": "".join(text.replace("k", f"k{i}").format(f"x{n + 1}") for i in range(4)) for n in range(14)}
    assert "an !include of more than 1,000 files" in problem(load, text.format("x0"), **wide, x14="b: 1\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("".join(f"a{n}: 1\n" for n in range(6000)), "main.yaml:5001: "),
        ("a: [" + "b," * 21_000 + "]", "main.yaml:1: more than 20,000 values"),
        ("a: " + "[" * 150 + "]" * 150, "main.yaml:1: nested too deeply"),
        ("a: " + "9" * 5000, "main.yaml:1: a number with 5,000 digits"),
    ],
)
def test_a_file_that_is_no_config_by_its_size_is_an_error(load, text, message, monkeypatch):
    monkeypatch.setattr("lmtrain.config.yaml_loader.Loader.max_nodes", 20_000)
    assert problem(load, text).startswith(message)


@pytest.mark.parametrize(
    ("content", "parts"),
    [(b"a: \xff\xfe\n", ("byte 3", "ISO-8859-1")), (b"\x89PNG\r\n\x1a\n\x00\x80", ("byte 0", "binary"))],
)
def test_a_file_that_is_not_text_is_a_user_error(load, content, parts):
    assert [part for part in ("main.yaml: not UTF-8", *parts) if part not in problem(load, content)] == []


@pytest.mark.parametrize("path", [".", "foo://x.yaml", "memory://gone.yaml"])
def test_a_file_that_cannot_be_read_is_a_user_error(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        load_file(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_an_include_of_a_device_a_pipe_or_a_large_file_is_an_error_before_it_is_read(load, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with open(tmp_path / "large.yaml", "wb") as file:
        file.truncate(1 << 36)  # sparse
    for path, reason in (
        ("/dev/zero", "not a regular file"),
        ("file:///dev/zero", "not a regular file"),
        ("pipe", "not a regular file"),
        ("large.yaml", "larger than 10,000,000 bytes; is it a config?"),
    ):
        for text in (f"a: !include {path}\n", f"!include {path}\n"):
            assert problem(load, text).endswith(f"{path}: {reason} (included from main.yaml:1)")


@pytest.mark.parametrize(
    ("main", "text"),
    [("a: !include key.txt\n", "hf_secret\n"), ("!include key.txt\n", "root:x:0:secret\nb: secret: c\n")],
)
def test_an_include_of_another_kind_of_file_does_not_show_its_lines(load, tmp_path, text, main):
    (tmp_path / "key.txt").write_text(text)
    message = problem(load, main)
    assert message.startswith("key.txt")
    assert "secret" not in message


def test_a_secret_on_the_command_line_is_not_shown_in_an_error():
    with pytest.raises(UserError) as caught:
        parse_value("{abc", "--trainer.tracker.settings.api_key")
    assert str(caught.value).startswith("--trainer.tracker.settings.api_key: '***' ")
