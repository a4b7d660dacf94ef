"""Private names of other libraries: each is used in one file only, and has a reason."""

import ast
import re
from pathlib import Path

import lmtrain

ROOT = Path(lmtrain.__file__).parent
# All private names that lmtrain uses, by file. The tests of that file fail if one is removed.
USED = {
    # index, number and key-value store of the processes: the public module has none of them
    "runtime/distributed.py": {"jax._src"},
    # the module whose call is being traced: Flax has no public name for it
    "tracking/jit_log.py": {"_context"},
    # the processes of a pool: their deaths are noticed, and they are killed
    "preprocess/executor.py": {"_processes"},
    # cuDNN's packed layout has no public name in JAX; the second name is a string
    "models/attention/cudnn_packed.py": {"jax._src.cudnn", "jax._src.cudnn.fused_attention_stablehlo"},
}


def private_names(source: str) -> set[str]:
    """Imported modules with a leading underscore, and such attributes of other objects."""
    tree = ast.parse(source)
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_self(node.value)}
    # documented names with an underscore: of namedtuples, and os._exit
    own |= {"_replace", "_asdict", "_fields", "_exit"}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any(part.startswith("_") for part in (node.module or "").split(".")):
            found.add(node.module)
        elif isinstance(node, ast.Attribute) and not is_self(node.value) and node.attr not in own:
            found |= {node.attr} if node.attr.startswith("_") and not node.attr.startswith("__") else set()
        elif isinstance(node, ast.Constant) and re.fullmatch(r"(\w+\.)+_\w+(\.\w+)*", str(node.value)):
            found.add(node.value)
    return found


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def test_each_is_used_in_one_file():
    files = [path for path in ROOT.rglob("*.py") if "hub" not in path.relative_to(ROOT).parts]
    found = {path.relative_to(ROOT).as_posix(): private_names(path.read_text(encoding="utf-8")) for path in files}
    assert {name: names for name, names in found.items() if names} == USED
