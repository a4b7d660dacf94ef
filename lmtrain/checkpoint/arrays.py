"""Trees of arrays on disk and at `gs://`, saved and restored by Orbax: the only file that uses it.

Arrays are stored uncompressed: random bits do not compress, and trying halves the speed.
"""

import functools
import os
import sys
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint._src.futures import future
from orbax.checkpoint._src.serialization import tensorstore_utils

# The parts of a checkpoint; `average` is optional.
_PARTS = ("params", "optimizer", "average")
# TensorStore's own first wait at a throttled gs:// is a second, and its retries take up to 15 minutes. Orbax has no
# setting for them. These take up to 2 minutes.
_RETRIES = {"max_retries": 16, "initial_delay": "100ms", "max_delay": "8s"}
for _context in (tensorstore_utils._BASE_TS_CONTEXT, tensorstore_utils._DEFAULT_OCDBT_TS_CONTEXT):
    _context["gcs_request_retries"] = _RETRIES
# Threads of a failed save wait for each other for minutes; a run that has failed must not wait for them at its end.
future._SignalingThread = functools.partial(future._SignalingThread, daemon=True)
# Timeout of a write, with its barriers among several processes; large states on slow disks take minutes.
_TIMEOUT_SECONDS = 1800


class ArrayWriter:
    """Writes arrays in the background; all processes of a run take part. Call `wait` before the next `start`."""

    def __init__(self) -> None:
        _drop_late_callbacks()
        options = ocp.options.AsyncOptions(timeout_secs=_TIMEOUT_SECONDS)
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


def _handler() -> Any:
    return ocp.CompositeCheckpointHandler(
        **{name: ocp.PyTreeCheckpointHandler(use_compression=False) for name in _PARTS}
    )


def _full(path: str) -> str:
    return path if "://" in path else os.path.abspath(path)


def _has(path: str, part: str) -> bool:
    return bool((epath.Path(_full(path)) / part).is_dir())


def _stored(path: str, part: str) -> Any:
    """Shapes and types of the stored tree."""
    handler = ocp.PyTreeCheckpointHandler()  # ocp.Checkpointer would require a file that parts do not have
    return handler.metadata(epath.Path(_full(path)) / part).tree


def _name(where: Any) -> str:
    return jax.tree_util.keystr(where, simple=True, separator="/")


def _named(tree: Any) -> dict[str, Any]:
    return {_name(where): leaf for where, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def count_bytes(parts: Mapping[str, Any]) -> int:
    """Bytes of the arrays on disk."""
    return sum(int(leaf.nbytes) for leaf in jax.tree.leaves(dict(parts)))
