"""What each device computes between the projections of a layer: by kernels or by XLA's operations, and its part of
sequences that are split over devices.

What a device's positions do to the state is linear: S_out = M S_in + N. A pass over its chunks gives both, with values
that are extended by zeros and the state [0 | 1]; devices gather the M and N of all, compute the state that reaches
their own positions, and the rule from there. Where a document begins on a device, M is 0. The convolution gets the last
inputs of the device before. Bytes do not depend on the length: those of N - 1 states and of three positions.
"""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from lmtrain.models.attention.kernel import Choice, before_ampere, missing_in_jax
from lmtrain.models.gated_delta.config import CHUNK, SCOPE, GatedDeltaConfig
from lmtrain.sharding.local import device_kind, dividing, num_parts, per_device, platform, split_over

# The widest heads of keys and of values of the kernels for GPUs: those with less memory on chip have none for more.
_WIDEST = 128, 256


def choose_delta(platform: str, device_kind: str, is_split: bool, dtype: Any, config: GatedDeltaConfig) -> Choice:
    """The implementation on a platform and a kind of device, the name of a module: kernels for TPUs or for NVIDIA GPUs,
    or XLA's operations. `is_split`: devices share sequences; `dtype` is that of the computation."""
    if platform == "tpu":
        if is_split:
            return Choice("chunks", "devices exchange states")
        return Choice("mosaic", "fastest on this device")
    if platform != "gpu":
        return Choice("chunks", "fastest on this device")
    if config.key_head_dim > _WIDEST[0] or config.value_head_dim > _WIDEST[1]:
        keys, values = _WIDEST
        return Choice("chunks", f"the kernels have no heads of keys wider than {keys}, of values wider than {values}")
    if jnp.dtype(dtype).itemsize != 2:
        return Choice("chunks", "the kernels have no 32-bit computation (trainer.mp)")
    missing = missing_in_jax("jax.experimental.pallas.triton", "the Triton backend of Pallas")
    if reason := before_ampere(device_kind) or missing:
        return Choice("chunks", f"triton {reason}")
    return Choice("triton", "fastest on this device")


def mix(
    raw: tuple[jax.Array, ...],
    taps: tuple[jax.Array, ...],
    g_BTH: jax.Array,
    beta_BTH: jax.Array,
    starts_BT: jax.Array | None,
    within_BT: jax.Array,
    scale_E: jax.Array,
    epsilons: tuple[float, float],
    config: GatedDeltaConfig,
) -> jax.Array:
    """Convolutions of projections to q, k [B, T, K C] and v [B, T, H E], the rule, and the norm of its outputs with a
    gate z like v: [B, T, H E]. `raw` are q, k, v and z. Each device computes its positions, sequences and heads.

    `taps` [W, heads, width] are the kernels of the convolutions, `starts` and `within` the first tokens of documents
    and positions in them, `epsilons` those of the norms of outputs, and of queries and keys.
    """
    if starts_BT is None:
        starts_BT = jnp.zeros(within_BT.shape, bool)
    batch, length = within_BT.shape
    rows, heads = dividing("act_batch", batch), dividing("act_heads", taps[1].shape[1])
    names = _positions_over(length, len(taps[0]))
    # modules of kernels import Pallas, which is slow
    name = choose_delta(platform(), device_kind(), bool(names), raw[0].dtype, config).name
    form = importlib.import_module(f"lmtrain.models.gated_delta.{name}")

    def local(raw: Any, taps: Any, g: Any, beta: Any, starts: Any, within: Any, scale: Any) -> Any:
        if name == "mosaic":
            return form.mix(raw, taps, g, beta, starts, within, scale, epsilons, CHUNK)
        before = _inputs_before(raw[:3], len(taps[0]), names) if names else None
        mixed = form.inputs(raw[:3], taps, within, before, epsilons[1])
        gates = g, beta, starts
        state = _state_before(form.state_change, mixed, gates, names) if names else None
        return form.outputs(mixed, raw[3], *gates, state, scale, epsilons[0])

    tokens, by_head, of_rows = (
        PartitionSpec(rows, names, heads), PartitionSpec(None, heads), PartitionSpec(rows, names)
    )  # fmt: skip
    specs = (tokens,) * 4, (by_head,) * 3, tokens, tokens, of_rows, of_rows, PartitionSpec()
    with jax.named_scope(SCOPE):
        mixed: jax.Array = per_device(local, specs, tokens)(raw, taps, g_BTH, beta_BTH, starts_BT, within_BT, scale_E)
    return mixed


def _positions_over(length: int, taps: int) -> tuple[str, ...]:
    """The mesh axes that split sequences of this length; none if these do not divide, or leave too few positions."""
    names = split_over("act_seq")
    parts = num_parts(names)
    return names if length % parts == 0 and length // parts >= taps - 1 else ()


def _inputs_before(raw: tuple[jax.Array, ...], taps: int, names: tuple[str, ...]) -> list[jax.Array]:
    """The last inputs of the device before, for the convolutions; zeros on the first."""
    joint = jnp.concatenate([x[:, x.shape[1] - taps + 1 :] for x in raw], axis=-1)
    neighbours = [(number, number + 1) for number in range(num_parts(names) - 1)]
    before = jax.lax.ppermute(joint, names, neighbours)
    sizes = [x.shape[2] for x in raw]
    return jnp.split(before, [sizes[0], sizes[0] + sizes[1]], axis=-1)


def _state_before(state_change: Any, mixed: tuple[jax.Array, ...], gates: Any, names: tuple[str, ...]) -> jax.Array:
    """The state before the device's first position, float32 [B, H, C, E]."""
    _, k, v = mixed
    batch, _, heads, values = v.shape
    width = k.shape[3]
    wider = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, width)))
    unit = jnp.broadcast_to(jnp.eye(width, values + width, values), (batch, heads, width, values + width))
    changes = jax.lax.all_gather(state_change(k, wider, *gates, unit), names)
    own, state = jax.lax.axis_index(names), jnp.zeros((batch, heads, width, values), jnp.float32)
    for number in range(num_parts(names) - 1):
        added, factor = changes[number, ..., :values], changes[number, ..., values:]
        moved = jnp.matmul(factor, state, precision=jax.lax.Precision.HIGHEST) + added
        state = jnp.where(number < own, moved, state)
    return state
