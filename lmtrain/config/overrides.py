"""Command-line overrides: `--trainer.num_train_steps 100` or `--trainer.num_train_steps=100`, values in YAML."""

from collections.abc import Callable, Sequence

from lmtrain.config.encodings import require_utf8
from lmtrain.config.errors import UserError
from lmtrain.config.other_systems import SWITCHES
from lmtrain.config.spellings import combine
from lmtrain.config.tree import ConfigTree, Origin, Path, lift
from lmtrain.config.yaml_loader import include_value, parse_value


def split_overrides(argv: Sequence[str], own_flags: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Separate the arguments of a subcommand from overrides of the config.

    `own_flags` are the flags of the subcommand (`--output`); every other `--name` is an override and takes the next
    argument as its value unless it has `=`. Returns the remaining arguments, and (name, value text) pairs in order.
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
        if (own := f"--{name.removeprefix('--').replace('-', '_')}") in own_flags:
            raise UserError(f"{name}: no such flag; did you mean {own}?")
        if (switch := name.removeprefix("--")) in SWITCHES:
            raise UserError(f"{name}: no such setting; {SWITCHES[switch]}")
        if not equals:
            if position == len(argv) or argv[position].startswith("--"):
                raise UserError(f"{name} needs a value, for example {name} VALUE")
            value = argv[position]
            position += 1
        overrides.append((name.removeprefix("--"), value))
    return rest, overrides


def apply_overrides(
    tree: ConfigTree,
    overrides: Sequence[tuple[str, str]],
    make_room: Callable[[ConfigTree, ConfigTree], ConfigTree] = lambda under, over: under,
) -> ConfigTree:
    """Apply the overrides to `tree` in order; a later one wins over an earlier one.

    `make_room` removes settings of the lower tree that conflict with an override.
    """
    for name, text in overrides:
        flag = f"--{name}"
        if "," in name:
            raise UserError(f"{flag}: no such setting; did you mean --{name.replace(',', '.')}?")
        path: Path = tuple(name.split("."))
        if not all(path):
            raise UserError(f"{flag}: expected a dotted name such as --trainer.num_train_steps")
        if not text.strip():
            raise UserError(f"{flag}: the value is empty, as an unset variable of a shell is; write null for no value")
        require_utf8(f"{name}={text}", flag)
        if text.startswith("include "):
            new = include_value(text.removeprefix("include ").strip(), flag, path)
        else:
            new = lift(ConfigTree(parse_value(text, flag)), path)
        new.origins |= {path[: end + 1]: Origin(flag) for end in range(len(path))}
        tree = combine(make_room(tree, new), new)
    return tree
