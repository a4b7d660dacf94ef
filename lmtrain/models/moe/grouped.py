"""Grouped products: each row is multiplied with the matrix of its expert. One record per kernel, chosen by platform.

R rows, sorted by expert  E experts  I inputs  O outputs
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import jax

from lmtrain.models.attention.choose import Choice
from lmtrain.sharding.local import platform

# (x [R, I], kernel [E, I, O], sizes int32 [E]) -> [R, O]
Call = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@dataclass(frozen=True)
class GroupedKernel:
    """A kernel of grouped products.

    `call(x, kernel, sizes)` multiplies the rows of each expert, in their order, with its matrix, and has derivatives.
    Results and gradients of rows after the last expert's are 0, whatever these rows contain; so are gradients of
    experts without rows. `rows_computed(rows, experts)` is the mean number of rows that a product computes with
    balanced random routing: more than `rows`, since a tile has one expert. `mean_trips(rows, experts)` is the mean
    number of tiles of an expert, if its products are in the text of a compiled program, in loops over tiles; None for
    kernels, whose FLOPs are counted by formula. `unavailable` returns why the kernel cannot run with the installed JAX;
    empty if it can.
    """

    name: str
    call: Call
    rows_computed: Callable[[int, int], float]
    mean_trips: Callable[[int, int], float] | None = None
    unavailable: Callable[[], str] = lambda: ""


# By platform: modules of this folder with a record `KERNEL`, the fastest first. The last runs everywhere.
_KERNELS = {"tpu": ("megablox", "tiled"), "gpu": ("triton", "tiled"), "cpu": ("tiled",)}

# Part of the name of all grouped products in a compiled program.
SCOPE = "grouped_product"


def kernel_of(name: str) -> GroupedKernel:
    """The kernel of a name."""
    kernel: GroupedKernel = importlib.import_module(f"lmtrain.models.moe.{name}").KERNEL
    return kernel


def choose_grouped(platform: str) -> Choice:
    """The kernel for a platform, cpu, gpu or tpu."""
    reasons: list[str] = []
    for kernel in map(kernel_of, _KERNELS[platform]):
        if not (reason := kernel.unavailable()):
            return Choice(kernel.name, "; ".join(reasons) or "fastest on this device")
        reasons.append(f"{kernel.name} {reason}")
    raise AssertionError(reasons)


def supports(products: str) -> bool:
    return False


def grouped(x_RI: jax.Array, kernel_EIO: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """The product of each row with the matrix of its expert, [R, O]; see `GroupedKernel`."""
    with jax.named_scope(SCOPE):
        return kernel_of(choose_grouped(platform()).name).call(x_RI, kernel_EIO, sizes_E)
