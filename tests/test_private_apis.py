"""Private names of other libraries: each is used in one file only, and still exists."""

import argparse
import ast
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import lmtrain

ROOT = Path(lmtrain.__file__).parent
# All private names that lmtrain uses, by file. For each there is a test below that fails if it is removed.
USED = {
    "runtime/distributed.py": {"jax._src"},
    "tracking/jit_log.py": {"_context"},
    "preprocess/local.py": {"_processes"},
    "commands/arguments.py": {"_actions"},
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
    return found


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def test_each_is_used_in_one_file():
    files = [path for path in ROOT.rglob("*.py") if "hub" not in path.relative_to(ROOT).parts]
    found = {path.relative_to(ROOT).as_posix(): private_names(path.read_text(encoding="utf-8")) for path in files}
    assert {name: names for name, names in found.items() if names} == USED


def test_jax_returns_the_number_of_a_process():
    from jax._src import distributed

    state = distributed.global_state
    assert {"client", "process_id", "num_processes"} <= set(dir(state))


def test_flax_returns_the_module_being_called():
    import flax.linen as nn
    import jax

    class Model(nn.Module):
        @nn.compact
        def __call__(self):
            assert nn.module._context.module_stack[-1].name == self.name
            return 1

    assert Model(name="called").apply({}, rngs={"params": jax.random.key(0)}) == 1


def test_a_pool_has_its_processes():
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(abs, -1).result() == 1
        assert [type(number) for number in pool._processes] == [int]


def test_a_parser_has_its_flags():
    parser = argparse.ArgumentParser()
    parser.add_argument("--name")
    assert "--name" in [flag for action in parser._actions for flag in action.option_strings]
