"""YAML files: values, lines, includes, merges and errors."""

import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import fsspec
import pytest

from lmtrain.config.errors import UserError
from lmtrain.config.yaml_loader import load_file


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
    [
        ("6E-4", 6e-4),
        ("1e5", 1e5),
        ("-2e+3", -2e3),
        ("1.5e3", 1.5e3),
        (".5", 0.5),
        (".inf", float("inf")),
        ("12", 12),
        ("1_000", 1000),
        ("0x10", 16),
        ("'6E-4'", "6E-4"),
        ("6E-4x", "6E-4x"),
        ("e4", "e4"),
        ("~", None),
        ("", None),
        ("true", True),
        ("ünï ☃", "ünï ☃"),
        ("[1, {b: 2}]", [1, {"b": 2}]),
        ("010", 10),
        ("1:30", "1:30"),
    ],
)
def test_values_follow_yaml_1_2(load, written, value):
    read = load(f"a: {written}\n").data["a"]
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "\ufeff"])
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


def test_an_include_is_relative_to_the_including_file_and_nests(load):
    layer = load("x: 0\na: !include sub/one.yaml\n", sub__one="b: !include two.yaml\n", sub__two="\nc: 3\n")
    assert layer.data == {"x": 0, "a": {"b": {"c": 3}}}
    assert str(layer.origin_of(("a", "b", "c"))) == "sub/two.yaml:2"
    assert str(layer.origin_of(("a", "b"))) == "sub/one.yaml:1"
    assert str(layer.origin_of(("a",))) == "main.yaml:2"


def test_the_same_file_can_be_included_twice_and_in_a_list(load):
    layer = load("a: !include o.yaml\nb: [!include o.yaml, 2]\n", o="c: 1\n")
    assert layer.data == {"a": {"c": 1}, "b": [{"c": 1}, 2]}
    assert str(layer.origin_of(("b", 0, "c"))) == "o.yaml:1"


def test_files_at_urls_include_files_relative_to_them():
    with fsspec.open("memory://configs/main.yaml", "w") as file:
        file.write("a: !include part.yaml\n")
    with fsspec.open("memory://configs/part.yaml", "w") as file:
        file.write("b: 1\n")
    layer = load_file("memory://configs/main.yaml")
    assert layer.data == {"a": {"b": 1}}
    assert str(layer.origin_of(("a", "b"))) == "memory://configs/part.yaml:1"


def test_a_merge_adds_defaults_and_keeps_lines(load):
    layer = load("s:\n  <<: !include o.yaml\n  b: 20\n", o="a: 1\nb: 2\nc: {d: 3}\n")
    assert layer.data == {"s": {"a": 1, "b": 20, "c": {"d": 3}}}
    assert str(layer.origin_of(("s", "b"))) == "main.yaml:3"
    assert str(layer.origin_of(("s", "c", "d"))) == "o.yaml:3"


def test_the_earlier_entry_of_a_merge_list_wins_at_any_position(load):
    assert load("b: {x: 1}\ns:\n  x: 0\n  <<: [{x: 1, y: 1}, {y: 2, z: 2}]\n").data["s"] == {"x": 0, "y": 1, "z": 2}


def test_a_merge_at_the_top_of_a_file(load):
    layer = load("<<: !include o.yaml\na: {c: 3}\n", o="a: {b: 1, c: 2}\n")
    assert layer.data == {"a": {"b": 1, "c": 3}}
    assert str(layer.origin_of(("a", "b"))) == "o.yaml:1"


def test_an_anchor_can_be_used_twice(load):
    assert load("a: &x {b: [1]}\nc: *x\nd: {<<: *x, e: 2}\n").data["d"] == {"b": [1], "e": 2}


def test_lines_survive_a_merge_list_with_a_key_named_as_its_section(load):
    layer = load("s:\n  <<: [{s: 1}, {\n    c: 4}]\n")
    assert str(layer.origin_of(("s", "c"))) == "main.yaml:3"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n", "main.yaml:1: expected a map of settings at the top of the file"),
        ("\nabc\n", "main.yaml:2: expected a map of settings"),
        ("a:\n\tb: 1\n", "main.yaml:2: this is not valid YAML: found character '\\t'"),
        ("a: [1\nb: 2\n", "main.yaml:2: this is not valid YAML"),
        ("a: *x\n", "main.yaml:1: this is not valid YAML: found undefined alias 'x'"),
        ("a: 1\n---\nb: 2\n", "main.yaml:2: this is not valid YAML: "),
        ("a: 1\nb: 2\na: 3\n", "main.yaml:3: duplicate key 'a'; first set at main.yaml:1"),
        ("a:\n  b: 1\n  b: 1\n", "main.yaml:3: duplicate key 'b'; first set at main.yaml:2"),
        ("a:\n  3: 1\n", "main.yaml:2: a setting's name must be text, not '3'"),
        ("on: 1\n", "main.yaml:1: a setting's name must be text, not 'on'"),
        ("=: 1\n", "main.yaml:1: "),
        ("a:\n  <<: 3\n", "main.yaml:2: '<<:' needs a map, or a list of maps"),
        ("a: !include\n", "main.yaml:1: !include needs the path of a file"),
        ("a: !include [b]\n", "main.yaml:1: !include needs the path of a file"),
        ("a:\n  b: !inculde x.yaml\n", "main.yaml:2: could not determine a constructor for the tag '!inculde'"),
        ("a: !foo {b: 1}\n", "main.yaml:1: "),
        ("a: !foo [b]\n", "main.yaml:1: "),
        ("a: !!python/object/apply:os.getcwd []\n", "main.yaml:1: "),
        ("a: !!python/name:os.getcwd ''\n", "main.yaml:1: could not determine a constructor"),
        ("a: 2026-99-99\n", "main.yaml:1: month must be in 1..12"),
        ("a: &x\n  b: *x\n", "main.yaml:"),
        ("a: " + "[" * 2000 + "]" * 2000, "main.yaml"),
    ],
)
def test_an_invalid_file_is_a_user_error_with_its_line(load, text, message):
    assert problem(load, text).startswith(message)


def test_aliases_of_aliases_do_not_exhaust_the_memory(load):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)]
    assert "main.yaml:1: with its aliases this file has more than 100,000 values" in problem(load, "".join(lines))


def test_a_key_that_is_a_list_is_shown_as_written(load):
    assert "ScalarNode" not in problem(load, "? [a]\n: 1\n")


@pytest.mark.parametrize("content", [b"a: \xff\xfe\n", b"\x89PNG\r\n\x1a\n\x00\x80"])
def test_a_file_that_is_not_text_is_a_user_error(load, content):
    assert problem(load, content).startswith("main.yaml: not a text file in UTF-8")


def test_a_missing_include_is_an_error_with_its_path_and_the_including_line(load):
    message = problem(load, "x: 1\na: !include gone.yaml\n")
    assert message.startswith("gone.yaml: no such file")
    assert "main.yaml:2" in message


def test_an_error_in_an_included_file_names_that_file(load):
    assert problem(load, "a: !include o.yaml\n", o="b: 1\nb: 2\n").startswith("o.yaml:2: duplicate key 'b'")


def test_a_circular_include_shows_the_circle(load):
    message = problem(load, "a: !include one.yaml\n", one="b: !include main.yaml\n")
    assert message == "circular !include: main.yaml:1 -> one.yaml:1 -> main.yaml"


@pytest.mark.parametrize("path", ["gone.yaml", ".", "foo://x.yaml", "memory://gone.yaml"])
def test_a_file_that_cannot_be_read_is_a_user_error(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        load_file(path)
    assert str(caught.value).startswith(f"{path}: ")


class _Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(int(self.path.strip("/").removesuffix(".yaml")))
        self.end_headers()

    def do_HEAD(self):
        self.do_GET()

    def log_message(self, *_):
        pass


@pytest.mark.parametrize(("status", "message"), [(404, "no such file"), (403, "cannot be read: 403"), (500, "500")])
def test_the_status_of_a_server_is_reported(status, message):
    with HTTPServer(("127.0.0.1", 0), _Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/{status}.yaml"
        with pytest.raises(UserError) as caught:
            load_file(url)
        server.shutdown()
    assert str(caught.value).startswith(f"{url}: ")
    assert message in str(caught.value)


def test_an_unreachable_server_is_not_reported_as_a_missing_file():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(UserError, match="cannot be read: Cannot connect to host"):
        load_file(f"http://127.0.0.1:{port}/a.yaml")


def test_an_unindented_include_has_lower_priority_than_the_file(load):
    layer = load("!include o.yaml  # the base\na: {b: 10}\n", o="a: {b: 1, c: 2}\nd: 3\n")
    assert layer.data == {"a": {"b": 10, "c": 2}, "d": 3}
    assert str(layer.origin_of(("a", "b"))) == "main.yaml:2"
    assert str(layer.origin_of(("a", "c"))) == "o.yaml:1"


@pytest.mark.parametrize("own", ["", "# no settings\n", "---\n"])
def test_a_file_may_have_only_includes_and_the_last_wins(load, own):
    layer = load(f"!include o.yaml\n!include p.yaml\n{own}", o="a: 1\nb: 1\n", p="b: 2\n")
    assert layer.data == {"a": 1, "b": 2}


def test_unindented_includes_nest_and_work_in_a_section(load):
    layer = load("s: !include one.yaml\n", one="!include two.yaml\na: 1\n", two="a: 2\nb: {c: 3}\n")
    assert layer.data == {"s": {"a": 1, "b": {"c": 3}}}
    assert str(layer.origin_of(("s", "b", "c"))) == "two.yaml:2"


def test_lines_below_an_unindented_include_keep_their_numbers(load):
    assert problem(load, "!include o.yaml\na: 1\na: 2\n", o="").startswith("main.yaml:3: duplicate key 'a'")


@pytest.mark.parametrize(
    ("text", "other", "message"),
    [
        ("!include gone.yaml\n", "", "gone.yaml: no such file (included from main.yaml:1)"),
        ("a: 1\n!include main.yaml\n", "", "circular !include: main.yaml:2 -> main.yaml"),
        ("!include o.yaml\na: 1\n", "- 1\n", "o.yaml:1: expected a map of settings"),
        ("!include o.yaml\n- a\n", "b: 1\n", "main.yaml: expected a map of settings"),
    ],
)
def test_an_invalid_unindented_include_is_an_error(load, text, other, message):
    assert problem(load, text, o=other).startswith(message)


def test_any_value_can_be_included(load):
    layer = load("urls: !include urls.yaml\nn: [1, !include n.yaml]\n", urls="- a\n- b\n", n="7\n")
    assert layer.data == {"urls": ["a", "b"], "n": [1, 7]}
    assert str(layer.origin_of(("urls", 1))) == "urls.yaml:2"


def test_an_indented_include_is_not_merged_at_the_top(load):
    assert load("a: |\n  !include o.yaml\n").data == {"a": "!include o.yaml\n"}
