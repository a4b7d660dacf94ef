"""PyYAML's safe loader with the numbers of YAML 1.2: `6E-4` is a float, `010` is ten and `1:30` is text."""

import re

import yaml


class Loader(yaml.SafeLoader):
    """Composes nodes and constructs scalars; `yaml_loader.py` converts maps and lists."""


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
