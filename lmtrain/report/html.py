"""HTML elements. Text is escaped unless it is `Markup`."""

import html


class Markup(str):
    """Text that is already HTML. All other text is escaped when it is put into an element."""


_WITHOUT_END = {"meta", "br"}


def element(tag: str, *content: str, **attributes: str) -> Markup:
    """`element("td", "a < b", class_="text")` -> `<td class="text">a &lt; b</td>`."""
    names = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{html.escape(value)}"' for name, value in attributes.items() if value
    )
    if tag in _WITHOUT_END:
        return Markup(f"<{tag}{names}>")
    inner = "".join(part if isinstance(part, Markup) else html.escape(part) for part in content)
    return Markup(f"<{tag}{names}>{inner}</{tag}>")


def table(head: list[str], rows: list[list[str]], class_: str = "") -> Markup:
    """A table. The first cell of each row is its name. With an empty head, columns have no names."""
    names = [element("th", name, scope="col") for name in head]
    top = element("thead", element("tr", *names)) if head else Markup("")
    body = [
        element("tr", element("th", row[0], scope="row"), *(element("td", cell) for cell in row[1:])) for row in rows
    ]
    return element("div", element("table", top, element("tbody", *body), class_=class_), class_="scroll")


def swatch(colour: str) -> Markup:
    """A small square in a colour of the theme."""
    return element("span", class_="swatch", style=f"background:var(--{colour})")
