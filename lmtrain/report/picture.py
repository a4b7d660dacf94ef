"""Figures as files: a PNG for papers and chats, and an SVG for the page, whose colours follow the page's theme."""

import html
import io
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from lmtrain.report.theme import COLOURS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Parts of a picture that keep their names in an SVG: the page's script looks for them.
_PARTS = re.compile(r"(axis|line|faint|restart|time)-|(bad|note)$")


def to_png(figure: "Figure") -> bytes:
    """A figure as a PNG: the same bytes each time."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer, metadata={"Software": None})
    return buffer.getvalue()


def to_svg(figure: "Figure", name: str, description: str) -> str:
    """An `svg` element for a page. Its colours are variables of the page's style sheet; its ids start with `name`."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    buffer = io.StringIO()
    FigureCanvasSVG(figure).print_svg(buffer, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)
    ids = {found: f"{name}-{number}" for number, found in enumerate(re.findall(r'\bid="([^"]+)"', text))}
    ids |= {found: f"{name}-{found}" for found in ids if _PARTS.match(found)}
    text = re.sub(r'\bid="([^"]+)"', lambda found: f'id="{ids[found[1]]}"', text)
    text = re.sub(r"#([\w-]+)(?=[\")])", lambda found: f"#{ids.get(found[1], found[1])}", text)
    for variable, (colour, _) in COLOURS.items():
        text = text.replace(colour, f"var(--{variable})")
    text = re.sub(r' (?:width|height)="[\d.]+pt"', "", text)
    label = f' role="img" aria-label="{html.escape(description)}" stroke-linejoin="round"'
    return text.replace("<svg", f"<svg{label}", 1).strip()


def with_titles(svg: str, titles: Mapping[str, str]) -> str:
    """An SVG whose parts show a text when the pointer is over them. `titles` are texts by the parts' ids."""
    for name, title in titles.items():
        group = f'<g id="{name}">'
        svg = svg.replace(group, f"{group}<title>{html.escape(title)}</title>")
    return svg
