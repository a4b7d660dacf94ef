"""Command-line overrides: `--trainer.num_train_steps 100` or `--trainer.num_train_steps=100`, values in YAML."""

from collections.abc import Sequence
from typing import Any

from lmtrain.config.errors import UserError
from lmtrain.config.layers import Layer, Origin, Path, merge
from lmtrain.config.yaml_loader import include_value, parse_value


def split_overrides(argv: Sequence[str], own_flags: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Separate a verb's own arguments from overrides of the config.

    `own_flags` are the flags the verb knows (`--output`); every other `--name` is an override and takes the next
    argument as its value unless it has `=`. Returns what is left for the verb, and (name, value text) pairs in order.
    """
    rest: list[str] = []
    overrides: list[tuple[str, str]] = []
    position = 0
    while position < len(argv):
        argument = argv[position]
        position += 1
        name, equals, value = argument.partition("=")
        if not argument.startswith("--") or argument == "--" or name in own_flags:
            rest.append(argument)
            continue
        if not equals:
            if position == len(argv) or argv[position].startswith("--"):
                raise UserError(f"{name} needs a value, for example {name} VALUE")
            value = argv[position]
            position += 1
        overrides.append((name.removeprefix("--"), value))
    return rest, overrides


def overrides_layer(overrides: Sequence[tuple[str, str]]) -> Layer:
    """One layer out of all overrides; a later one wins over an earlier one."""
    layer = Layer()
    for name, text in overrides:
        flag = f"--{name}"
        path: Path = tuple(name.split("."))
        if not all(path):
            raise UserError(f"{flag}: expected a dotted name such as --trainer.num_train_steps")
        if text.startswith("include "):
            included = include_value(text.removeprefix("include ").strip(), flag)
            value: Any = included.data
            origins = {(*path, *below): origin for below, origin in included.origins.items()}
        else:
            value, origins = parse_value(text, flag), {}
        data: Any = value
        for part in reversed(path):
            data = {part: data}
        origins |= {path[: end + 1]: Origin(flag) for end in range(len(path))}
        layer = merge(layer, Layer(data, origins))
    return layer
