"""Saving training state in the background, and loading it.

A checkpoint is a folder `step-<N>` with the parts `params`, `optimizer`, perhaps `average` (arrays, by Orbax) and `run`
(JSON).
Orbax writes it under another name and renames it when all is there, so a killed save leaves nothing that looks whole.
`AsyncCheckpointer` is used rather than `CheckpointManager`: names, what to keep and when to save are ours to decide.
"""

import os
import shutil
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from lmtrain.checkpoint.config import CheckpointerConfig
from lmtrain.checkpoint.discovery import Checkpoint, list_checkpoints, step_folder
from lmtrain.checkpoint.policies import Kind, decide
from lmtrain.config.errors import UserError
from lmtrain.runtime.logging import log


class Checkpointer:
    """Saves into one run's folder, which is made. `clock` gives seconds and never runs backwards.

    Raises `UserError` if the folder cannot be made: better now than at the first save.
    """

    def __init__(self, folder: str, config: CheckpointerConfig, clock: Callable[[], float] = time.monotonic):
        self.folder = os.path.abspath(folder)
        try:
            os.makedirs(self.folder, exist_ok=True)
        except OSError as error:
            raise UserError(f"trainer.checkpointer.base_path: {folder} cannot be made: {error.strerror}") from None
        self._config = config
        self._clock = clock
        self._last_save = clock()
        self._orbax = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())
        self._saving: Checkpoint | None = None
        self._temporary = [c for c in list_checkpoints(self.folder) if c.kind is Kind.TEMPORARY]
        self._remove_leftovers()

    def due(self, step: int, last: bool, stopping: bool = False) -> Kind | None:
        """The kind of checkpoint to save after `step` updates, None for no save.

        A run that is stopping before its end saves at least a temporary one.
        """
        elapsed = self._clock() - self._last_save
        kind = decide(step, self._config.keep, self._config.save_interval, elapsed, last)
        return Kind.TEMPORARY if kind is None and stopping else kind

    def save(self, step: int, kind: Kind, parts: Mapping[str, Any], run_info: dict[str, Any]) -> None:
        """Copy the trees of arrays `parts` to the host, then write them behind. Waits for the save before it."""
        self.finish()
        checkpoint = Checkpoint(step, step_folder(self.folder, step))
        if os.path.isdir(checkpoint.path):
            return  # a temporary checkpoint of this very step, from before a restart
        self._orbax.save(
            checkpoint.path,
            args=ocp.args.Composite(
                **{name: ocp.args.StandardSave(part) for name, part in parts.items()},
                run=ocp.args.JsonSave(run_info | {"step": step, "kind": kind.value}),
            ),
        )
        self._saving = checkpoint
        if kind is Kind.TEMPORARY:
            self._temporary.append(checkpoint)
        self._last_save = self._clock()

    def finish(self) -> None:
        """Wait until the save under way is complete, then delete the temporary checkpoints before it."""
        if self._saving is None:
            return
        self._orbax.wait_until_finished()
        for old in [c for c in self._temporary if c.step < self._saving.step]:
            _delete(old.path)
            self._temporary.remove(old)
        log.info(f"saved {self._saving.path}")
        self._saving = None

    def close(self) -> None:
        self.finish()
        self._orbax.close()

    def _remove_leftovers(self) -> None:
        """What a killed process was writing or deleting."""
        for name in os.listdir(self.folder):
            if "orbax-checkpoint-tmp" in name or name.startswith("deleting-"):
                shutil.rmtree(os.path.join(self.folder, name))


def load_arrays(checkpoint: Checkpoint, part: str, like: Any) -> Any:
    """The part `part` of a checkpoint, with the shapes, types and shardings of the tree `like`."""
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as orbax:
        args = ocp.args.Composite(**{part: ocp.args.StandardRestore(like)})
        return orbax.restore(os.path.abspath(checkpoint.path), args=args)[part]


def stored_shapes(checkpoint: Checkpoint, part: str) -> dict[str, tuple[int, ...]]:
    """The shapes of a part's arrays by name, such as `blocks/mlp/up/kernel`; empty if there is no such part."""
    if not os.path.isdir(os.path.join(checkpoint.path, part)):
        return {}
    return {name: tuple(leaf.shape) for name, leaf in _named(_stored(checkpoint, part)).items()}


def load_some_arrays(checkpoint: Checkpoint, part: str, like: Any, fresh: Any) -> Any:
    """`fresh`, a tree as `like`, with the arrays that the checkpoint has in their place."""
    if not os.path.isdir(os.path.join(checkpoint.path, part)):
        return fresh
    wanted = _named(like)
    anywhere = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def target(path: Any, stored: Any) -> Any:
        found = wanted.get(jax.tree_util.keystr(path, simple=True, separator="/"))
        return jax.ShapeDtypeStruct(stored.shape, stored.dtype, sharding=anywhere) if found is None else found

    tree = jax.tree_util.tree_map_with_path(target, _stored(checkpoint, part))
    loaded = _named(load_arrays(checkpoint, part, tree))
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: loaded.get(jax.tree_util.keystr(path, simple=True, separator="/"), leaf), fresh
    )


def _stored(checkpoint: Checkpoint, part: str) -> Any:
    """The tree of what is stored: shapes and types."""
    handler = ocp.StandardCheckpointHandler()  # a Checkpointer round it would miss a file that parts do not have
    return handler.metadata(epath.Path(os.path.abspath(checkpoint.path)) / part).tree


def _named(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def with_shardings(abstract: Any, shardings: Any) -> Any:
    """A tree of `jax.ShapeDtypeStruct` that says where each array goes, for `load_arrays`."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), abstract, shardings
    )


def _delete(path: str) -> None:
    """Rename first, so that a half-deleted checkpoint does not look like a whole one."""
    doomed = os.path.join(os.path.dirname(path), f"deleting-{os.path.basename(path)}")
    os.rename(path, doomed)
    shutil.rmtree(doomed)
