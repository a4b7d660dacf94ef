"""The page's JavaScript: one inline script, allowed by its hash and nothing else, and the data that it reads."""

import base64
import hashlib
import json
from functools import cache
from importlib.resources import files
from typing import Any

from lmtrain.report.html import Markup, element

FILES = ("scale.js", "redraw.js", "chart.js", "controls.js")


@cache
def script() -> str:
    """All files in one, in the order in which they use one another."""
    folder = files("lmtrain.report")
    return '"use strict";\n' + "\n".join(folder.joinpath(name).read_text(encoding="utf-8") for name in FILES)


def script_source() -> str:
    """What a Content-Security-Policy allows: a script with these bytes. Text of a run can never run as one."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script().encode()).digest()).decode()}'"


def script_elements(data: dict[str, Any]) -> Markup:
    """The data, which no browser runs, and the script. `<` is escaped in the data, so that no text can end it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False).replace("<", "\\u003c")
    stored = element("script", Markup(text), type="application/json", id="chart-data")
    return Markup(stored + element("script", Markup(script())))
