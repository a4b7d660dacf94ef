"""Every package that lmtrain imports is installed with it or with one of its extras."""

import ast
import sys
import tomllib
from importlib.metadata import packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]


def name(requirement: str) -> str:
    return canonicalize_name(Requirement(requirement).name)


def names(requirements: list[str]) -> set[str]:
    """Names of the packages that are required here, without those of extras."""
    found = [Requirement(text) for text in requirements]
    return {canonicalize_name(one.name) for one in found if one.marker is None or one.marker.evaluate({"extra": ""})}


def imported_modules() -> dict[str, Path]:
    """Top-level modules that are imported anywhere in lmtrain, with one file that does."""
    found = {}
    for path in (ROOT / "lmtrain").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0]: path for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found[node.module.split(".")[0]] = path
    return {name: path for name, path in found.items() if name not in {*sys.stdlib_module_names, "lmtrain"}}


def test_every_imported_package_is_required():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = names(project["dependencies"])
    extras = set().union(*(map(name, extra) for extra in project["optional-dependencies"].values()))
    by_required = set().union(*(names(requires(name) or []) for name in required))  # such as numpy, by jax
    installed = packages_distributions()
    missing = {}
    for module, path in imported_modules().items():
        packages = {canonicalize_name(name) for name in installed.get(module, [module])}
        if not packages & (required | by_required | extras):
            missing[module] = path
    assert missing == {}
