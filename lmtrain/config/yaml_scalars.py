"""PyYAML's safe loader with the numbers of YAML 1.2: `6E-4` is a float, `010` is ten and `1:30` is text."""

import re
from typing import Any

import yaml


class TooManyNodesError(Exception):
    """A text has more nodes than it may. `line` is that of the first one too many, from 0."""

    def __init__(self, what: str, line: int):
        super().__init__(what)
        self.line = line


class Loader(yaml.SafeLoader):
    """Composes nodes and constructs scalars; `yaml_loader.py` converts maps and lists."""

    max_nodes = 200_000  # keys and values
    max_keys = 5000  # of a map
    num_nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """The next node. Raises `TooManyNodesError`."""
        self.num_nodes += 1
        if self.num_nodes > self.max_nodes:
            raise TooManyNodesError(f"more than {self.max_nodes:,} values", self.peek_event().start_mark.line)
        if isinstance(parent, yaml.MappingNode) and index is None and len(parent.value) >= self.max_keys:
            raise TooManyNodesError(f"a map with more than {self.max_keys:,} names", self.peek_event().start_mark.line)
        node: yaml.Node | None = super().compose_node(parent, index)
        return node


def _use_yaml_1_2_numbers() -> None:
    """Replace the number rules of PyYAML, which follows YAML 1.1: it reads 6E-4 as text, 010 as 8 and 1:30 as 90."""
    int_tag, float_tag = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in (int_tag, float_tag)]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    numbers = {
        int_tag: r"[-+]?\d[\d_]*|0o[0-7]+|0x[\da-fA-F]+",
        float_tag: r"[-+]?(\.\d+|\d[\d_]*(\.[\d_]*)?)([eE][-+]?\d+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
    }
    for tag, pattern in numbers.items():  # in this order: int before float
        Loader.add_implicit_resolver(tag, re.compile(f"^({pattern})$"), list("-+.0123456789"))

    def construct_int(loader: Loader, node: yaml.ScalarNode) -> int:
        text = node.value.replace("_", "")
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)

    Loader.add_constructor(int_tag, construct_int)


_use_yaml_1_2_numbers()
