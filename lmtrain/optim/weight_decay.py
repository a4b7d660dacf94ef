"""Weight-decay mask: selection of the parameters that decay."""

import re
from typing import Any

import jax

from lmtrain.config.errors import UserError
from lmtrain.optim.config import ScheduleConfig

_MATRICES = ("kernel", "lora_a", "lora_b")


def decay_mask(config: ScheduleConfig, params: Any) -> Any:
    """True for parameters that decay. Without settings: the layers' matrices, which are leaves named `kernel`, and
    the matrices of LoRA.

    Raises `UserError` for an entry of `weight_decay_modules` that matches no parameter path.
    """
    by_default, modules = config.default_weight_decay_mask, config.weight_decay_modules
    paths = jax.tree_util.tree_map_with_path(
        lambda path, _: jax.tree_util.keystr(path, simple=True, separator="/"), params
    )
    entries = [modules] if isinstance(modules, str) else modules or []
    for module in entries:
        if not any(_is_in(module, path, isinstance(modules, str)) for path in jax.tree.leaves(paths)):
            raise UserError(
                f"optimizer.weight_decay_modules: {module!r} matches no parameter path; "
                f"expected one of {', '.join(jax.tree.leaves(paths))}"
            )

    def decays(path: str) -> bool:
        if modules is None and by_default is False:
            return True
        use_default = by_default or (by_default is None and modules is None)
        named = any(_is_in(module, path, isinstance(modules, str)) for module in entries)
        return named or bool(use_default and path.rsplit("/", 1)[-1] in _MATRICES)

    return jax.tree.map(decays, paths)


def _is_in(module: str, path: str, is_pattern: bool) -> bool:
    return re.match(module, path) is not None if is_pattern else module in path
