"""Colours and the style sheet. Plots are drawn in the light colours; on a page they follow the browser's theme."""

# name -> (light, dark). Light colours must be distinct: they are replaced by value in an SVG.
COLOURS = {
    "ink": ("#1c2530", "#e4e8ee"),
    "soft": ("#5d6b7a", "#9aa7b6"),
    "line": ("#dde2e8", "#333d49"),
    "paper": ("#ffffff", "#14181d"),
    "panel": ("#f6f8fa", "#1b2128"),
    "bad": ("#c81e1e", "#ff7b72"),
    "restart": ("#8a5a00", "#e0b050"),
    "c0": ("#1f63c9", "#6ea8fe"),
    "c1": ("#d9610b", "#ff9d57"),
    "c2": ("#0f8a5f", "#4fd6a2"),
    "c3": ("#8b3fc6", "#c792ff"),
    "c4": ("#b8256a", "#ff7eb6"),
    "c5": ("#0e87a0", "#52d3ec"),
    "c6": ("#7a6a00", "#d8c53a"),
    "c7": ("#6b7280", "#aab3bf"),
}
CURVES = [name for name in COLOURS if name[0] == "c" and name[1:].isdigit()]

# The kinds of wall time in the order of the bar, each with its colour and its meaning.
TIMES = {
    "steps": ("c0", "training that counts"),
    "evaluation": ("c5", "validation losses"),
    "save_blocking": ("c3", "waiting for a checkpoint's copy to the host"),
    "data_wait": ("c6", "waiting for data"),
    "compile": ("c2", "compilation by XLA"),
    "start_up": ("c1", "imports, devices, data"),
    "restore": ("c4", "loading a checkpoint"),
    "lost": ("bad", "steps repeated after a restart"),
    "down": ("c7", "between two starts"),
}


def light(name: str) -> str:
    """A colour of the light theme."""
    return COLOURS[name][0]


def _variables(which: int) -> str:
    return "".join(f"--{name}:{values[which]};" for name, values in COLOURS.items())


STYLE = (
    f":root{{color-scheme:light dark;{_variables(0)}}}"
    f"@media (prefers-color-scheme:dark){{:root{{{_variables(1)}}}}}"
    # a printed page is always light
    f"@media print{{:root{{color-scheme:light;{_variables(0)}}}}}"
    """
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1180px;margin:0 auto;padding:28px 24px 64px}
h1{font-size:26px;line-height:1.25;margin:0 0 2px;overflow-wrap:anywhere}
h2{font-size:18px;margin:36px 0 10px}
p{margin:4px 0}
.soft,figcaption,small{color:var(--soft)}
figcaption,small{font-size:13px}
.path{font-family:ui-monospace,"DejaVu Sans Mono",monospace;font-size:13px;overflow-wrap:anywhere}
.notices{border-left:3px solid var(--restart);background:var(--panel);padding:8px 14px;margin:14px 0;list-style:none}
.notices li{overflow-wrap:anywhere}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(170px,1fr));gap:10px;margin:20px 0 8px}
.tile{background:var(--panel);border:1px solid var(--line);border-radius:8px;padding:10px 14px}
.tile b{display:block;font-size:21px;font-weight:600;line-height:1.3;font-variant-numeric:tabular-nums}
.tile span{color:var(--soft);font-size:13px;display:block}
.plots{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:14px}
figure{position:relative;margin:0;border:1px solid var(--line);border-radius:8px;padding:10px 12px;min-width:0}
figure.wide{grid-column:1/-1}
figure svg{display:block;width:100%;height:auto}
.scroll{overflow-x:auto;border:1px solid var(--line);border-radius:8px}
table{border-collapse:collapse;width:100%;font-size:14px;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:6px 9px;border-top:1px solid var(--line);vertical-align:top}
thead th{border-top:0;background:var(--panel);color:var(--soft);font-weight:600;vertical-align:bottom}
th:first-child,td:first-child,.text th,.text td{text-align:left}
td{white-space:nowrap}
.text td{white-space:pre-wrap;overflow-wrap:anywhere;min-width:130px}
td small{display:block}
.samples th{width:1%;white-space:nowrap}
tbody th{font-weight:500}
tbody:first-child tr:first-child>*{border-top:0}
.swatch{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:7px}
details{border:1px solid var(--line);border-radius:8px;margin:10px 0;padding:0 14px}
summary{cursor:pointer;padding:9px 0;font-weight:500;overflow-wrap:anywhere}
pre{overflow-x:auto;font:13px/1.45 ui-monospace,"DejaVu Sans Mono",monospace;margin:0 0 12px}
h3{font-size:14px;margin:18px 0 6px;overflow-wrap:anywhere;white-space:pre-wrap}
.controls{display:flex;flex-wrap:wrap;gap:4px 18px;margin:0 0 10px;color:var(--soft);font-size:14px}
.controls label{display:flex;align-items:center;gap:6px;white-space:pre}
.controls select{font:inherit;color:var(--ink);background:var(--panel);border:1px solid var(--line);border-radius:5px}
.tip{display:none;position:absolute;z-index:1;margin:8px;padding:5px 9px;pointer-events:none;white-space:pre;
font-size:13px;background:var(--panel);border:1px solid var(--line);border-radius:6px;max-width:60%;overflow:hidden;
text-overflow:ellipsis;font-variant-numeric:tabular-nums}
.tip.shown{display:block}
.tip.left{transform:translateX(calc(-100% - 16px))}
.cross{pointer-events:none}
svg text{font-family:"DejaVu Sans",system-ui,sans-serif}
@media print{.controls{display:none}}
@media (max-width:760px){.plots{grid-template-columns:minmax(0,1fr)}main{padding:16px 12px 40px}}
"""
)
