"""Text is escaped, markup is not."""

from lmtrain.report.html import Markup, element, swatch, table


def test_text_is_escaped_and_markup_is_not():
    assert element("p", "a < b & c") == "<p>a &lt; b &amp; c</p>"
    assert element("p", element("b", "x"), " > y") == "<p><b>x</b> &gt; y</p>"
    assert element("p", Markup("<i></i>")) == "<p><i></i></p>"


def test_attributes_are_escaped():
    assert element("p", class_='"><script>') == '<p class="&quot;&gt;&lt;script&gt;"></p>'
    assert element("meta", http_equiv="x", content="") == '<meta http-equiv="x">'


def test_a_table_names_its_rows():
    made = table(["", "<a>"], [["loss", "1", swatch("c0")]])
    assert made == (
        '<div class="scroll"><table><thead><tr><th scope="col"></th><th scope="col">&lt;a&gt;</th></tr></thead>'
        '<tbody><tr><th scope="row">loss</th><td>1</td>'
        '<td><span class="swatch" style="background:var(--c0)"></span></td></tr></tbody></table></div>'
    )
