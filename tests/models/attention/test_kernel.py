"""Kernels are known to their own folder only."""

import ast
from pathlib import Path
from typing import get_args

import lmtrain
from lmtrain.models.attention.kernel import kernel_of, kernels
from lmtrain.models.attention.names import PLAIN, AttentionBackend

ROOT = Path(lmtrain.__file__).parent
NAMES = set(get_args(AttentionBackend)) - {"auto"}


def words(path):
    """The strings, names and imported modules of a file of source."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from node.module.split(".")


def test_each_name_has_a_record():
    assert [kernel.name for kernel in kernels()] == [name for name in get_args(AttentionBackend) if name != "auto"]
    assert len({kernel.scope for kernel in kernels()}) == len(NAMES)
    assert kernel_of(PLAIN).platform is None


def test_no_file_outside_the_folder_names_a_kernel():
    # grouped products have kernels of their own
    outside = [path for path in ROOT.rglob("*.py") if not {"attention", "moe"} & set(path.parts)]
    assert len(outside) > 100
    naming = {str(path.relative_to(ROOT)): found for path in outside if (found := NAMES & set(words(path)))}
    assert not naming


def test_no_string_names_a_source_file():
    """Operations of a compiled program are recognized by scopes, not by the file that they are from."""
    files = {path.name for path in ROOT.rglob("*.py")} - {"__init__.py", "__main__.py"}
    naming = {}
    for path in ROOT.rglob("*.py"):
        tree = ast.parse(path.read_text())
        documentation = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and isinstance(node.body[0], ast.Expr)
        }
        strings = {
            node.value.rpartition("/")[2]
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation
        }
        if found := strings & files:
            naming[str(path.relative_to(ROOT))] = found
    assert naming.keys() <= {"models/backpack/hf.py"}  # the file that goes with an export
