"""Colours. PNG files have the light ones; a page follows the browser's theme."""

# name -> (light, dark)
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


def css_variables(theme: int) -> str:
    """The colours of the light theme (0) or the dark one (1) as variables of a style sheet: `--ink:#1c2530;...`."""
    return "".join(f"--{name}:{colours[theme]};" for name, colours in COLOURS.items())
