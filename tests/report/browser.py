"""Runs the page's script without a browser: V8 with the part of a document that the script uses."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from py_mini_racer import mini_racer
from report.made import WITHOUT_END

from lmtrain.report.page import script

_DOCUMENT = Path(__file__).with_name("document.js").read_text()


class Browser:
    """A page after its script has run. `eval` gives the JSON value of an expression."""

    def __init__(self, engine: Any, page: str, hash_: str):
        self._engine = engine
        engine.eval(f"{_DOCUMENT}\nopenPage({json.dumps(_tree(page))}, {json.dumps(hash_)})")
        engine.eval(script())

    def eval(self, expression: str) -> Any:
        return json.loads(self._engine.eval(f"JSON.stringify({expression})"))

    def do(self, statement: str) -> None:
        self._engine.eval(statement)


@contextmanager
def open_page(page: str, hash_: str = "") -> Iterator[Browser]:
    with mini_racer() as engine:
        yield Browser(engine, page, hash_)


def _tree(page: str) -> list:
    parser = _Parser()
    parser.feed(page)
    parser.close()
    return parser.root


class _Parser(HTMLParser):
    """Elements as [tag, attributes, children]."""

    def __init__(self) -> None:
        super().__init__()
        self.root: list = ["root", {}, []]
        self._open = [self.root]

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in WITHOUT_END:
            self._open.append(self._open[-1][2][-1])

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        self._open[-1][2].append([tag, dict(attrs), []])

    def handle_endtag(self, tag: str) -> None:
        self._open.pop()

    def handle_data(self, data: str) -> None:
        self._open[-1][2].append(data)
