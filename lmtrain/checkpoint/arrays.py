"""Trees of arrays on disk and at `gs://`, saved and restored by Orbax: the only file that uses it.

Arrays are stored uncompressed: random bits do not compress, and trying halves the speed.
"""

import copy
import functools
import os
import sys
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from etils import epath

# The parts of a checkpoint; `average` is optional.
_PARTS = ("params", "optimizer", "average")
# TensorStore's own first wait at a throttled gs:// is a second, and its retries take up to 15 minutes. These take up to
# 2 minutes. Orbax has no setting for them: its handler of arrays gets them, not the last step of a save, which joins
# the files of all processes.
_RETRIES = {"max_retries": 16, "initial_delay": "100ms", "max_delay": "8s"}
# Timeout of a write, with its barriers among several processes; large states on slow disks take minutes.
_TIMEOUT_SECONDS = 1800


class ArrayWriter:
    """Writes arrays in the background; all processes of a run take part. Call `wait` before the next `start`."""

    def __init__(self) -> None:
        _drop_late_callbacks()
        # Threads that create folders in the background, and those that wait for them, would keep a run whose save has
        # failed from ending for minutes.
        options = ocp.options.AsyncOptions(timeout_secs=_TIMEOUT_SECONDS, create_directories_asynchronously=False)
        self._orbax = ocp.AsyncCheckpointer(_handler(), async_options=options)

    def start(self, path: str, parts: Mapping[str, Any]) -> None:
        """Copy the trees of arrays to the host, and start writing them to the folder `path`, which must not exist."""
        args = {name: ocp.args.PyTreeSave(tree) for name, tree in parts.items()}
        self._orbax.save(path, args=ocp.args.Composite(**args))

    def wait(self) -> None:
        """Wait until everything is written. Raises the error of a failed write."""
        self._orbax.wait_until_finished()

    def close(self) -> None:
        self._orbax.close()


@functools.cache
def _drop_late_callbacks() -> None:
    """Suppress the tracebacks that TensorStore's threads print after a failed save. Called once.

    They still call an event loop that Orbax has closed: hundreds of tracebacks, printed outside of logging, would hide
    the one line that says what failed.
    """
    others = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if not (unraisable.exc_type is RuntimeError and str(unraisable.exc_value) == "Event loop is closed"):
            others(unraisable)

    sys.unraisablehook = hook


def load_arrays(path: str, part: str, like: Any) -> Any:
    """Load `part` of the checkpoint at `path`, with the shapes, types and shardings of the tree `like`."""
    args = ocp.args.PyTreeRestore(like, restore_args=ocp.checkpoint_utils.construct_restore_args(like))
    with ocp.Checkpointer(_handler()) as orbax:
        return orbax.restore(_full(path), args=ocp.args.Composite(**{part: args}))[part]


def stored_arrays(path: str, part: str) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and types of a part's arrays by name, such as `blocks/mlp/up/kernel`; empty if the part is missing."""
    if not _has(path, part):
        return {}
    return {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in _named(_stored(path, part)).items()}


def load_some_arrays(path: str, part: str, like: Any, fresh: Any) -> Any:
    """The tree `fresh`, with its arrays replaced by those that the checkpoint has."""
    if not _has(path, part):
        return fresh
    targets = _named(like)
    anywhere = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def target(where: Any, stored: Any) -> Any:
        return targets.get(_name(where), jax.ShapeDtypeStruct(stored.shape, stored.dtype, sharding=anywhere))

    tree = jax.tree_util.tree_map_with_path(target, _stored(path, part))
    loaded = _named(load_arrays(path, part, tree))
    return jax.tree_util.tree_map_with_path(lambda where, leaf: loaded.get(_name(where), leaf), fresh)


def with_shardings(abstract: Any, shardings: Any) -> Any:
    """A tree of `jax.ShapeDtypeStruct` with the sharding of each array, for `load_arrays`."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), abstract, shardings
    )


class _ArrayHandler(ocp.type_handlers.ArrayHandler):  # type: ignore[misc]  # Orbax has no types
    """Orbax's handler of arrays, with our retries."""

    async def serialize(self, values: Any, infos: Any, args: Any = None) -> Any:
        return await super().serialize(values, _with_retries(infos), args)

    async def deserialize(self, infos: Any, args: Any = None) -> Any:
        return await super().deserialize(_with_retries(infos), args)

    async def metadata(self, infos: Any) -> Any:
        return await super().metadata(_with_retries(infos))


def _with_retries(infos: Any) -> list[Any]:
    """What Orbax knows of each array, with another context of TensorStore: one for all, which share its caches."""
    given = {id(info.ts_context): info.ts_context for info in infos}
    contexts = {
        key: tensorstore.Context({**context.spec.to_json(), "gcs_request_retries": _RETRIES})
        for key, context in given.items()
    }
    copies = [copy.copy(info) for info in infos]
    for info in copies:
        info.ts_context = contexts[id(info.ts_context)]
    return copies


def _tree_handler() -> Any:
    handlers = ((jax.Array, _ArrayHandler()), (np.ndarray, ocp.type_handlers.NumpyHandler()))
    registry = ocp.type_handlers.create_type_handler_registry(*handlers)
    return ocp.PyTreeCheckpointHandler(use_compression=False, type_handler_registry=registry)


def _handler() -> Any:
    return ocp.CompositeCheckpointHandler(**{name: _tree_handler() for name in _PARTS})


def _full(path: str) -> str:
    return path if "://" in path else os.path.abspath(path)


def _has(path: str, part: str) -> bool:
    return bool((epath.Path(_full(path)) / part).is_dir())


def _stored(path: str, part: str) -> Any:
    """Shapes and types of the stored tree."""
    # ocp.Checkpointer would require a file that parts do not have
    return _tree_handler().metadata(epath.Path(_full(path)) / part).tree


def _name(where: Any) -> str:
    return jax.tree_util.keystr(where, simple=True, separator="/")


def _named(tree: Any) -> dict[str, Any]:
    return {_name(where): leaf for where, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def count_bytes(parts: Mapping[str, Any]) -> int:
    """Bytes of the arrays on disk."""
    return sum(int(leaf.nbytes) for leaf in jax.tree.leaves(dict(parts)))
