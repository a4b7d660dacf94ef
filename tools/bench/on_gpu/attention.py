"""Attention of one layer by each backend, forward and backward: its error, and its time against its bound.

The bound of a backend is the greater of the time of seven products (two forward, five backward, since the scores are
computed again) over the keys that queries see, at the device's peak, and the time to read the inputs once per pass and
write the outputs once, at its bandwidth. Outputs and gradients are compared with attention in float32 in two samples:
the first sequence and heads of one group, and the last ones. Others do not change them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from on_gpu.device import accelerator, device, memory, platform
from on_gpu.results import Result, Table, Verdict
from on_gpu.timing import Pace, take_turns

from lmtrain.compiled.figures import bound
from lmtrain.models.attention.kernel import choose_attention, kernels, self_attend
from lmtrain.models.attention.names import PLAIN, AttentionNeeds
from lmtrain.plan.figures import memory_of
from lmtrain.runtime.accelerators import Accelerator
from lmtrain.runtime.errors import UserError

# Maximum error of outputs and gradients in bfloat16 against float32, relative to their norm.
TOLERANCE = 0.02
DOCUMENTS = 4


@dataclass(frozen=True)
class Shape:
    """The sizes of one layer's attention."""

    name: str
    batch: int
    heads: int
    kv_heads: int
    length: int
    width: int


SHAPES = [Shape("GPT-2 124M", 32, 12, 12, 1024, 64), Shape("Llama 1B", 4, 32, 8, 8192, 64)]
NANO = [Shape("nano", 2, 2, 2, 64, 16), Shape("nano with grouped heads", 2, 4, 2, 128, 16)]


def run(dry: bool, pace: Pace) -> Iterator[Result]:
    errors: dict[str, float] = {}
    for shape in NANO if dry else SHAPES:
        table = measure(shape, accelerator(dry), pace)
        yield table
        for row in table.rows:
            name = f"{row['backend']}, {shape.name}, {row['documents']} document(s)"
            if "failure" in row:
                yield Verdict("attention", False, f"{name}: {row['failure']}")
            elif "error" in row:
                errors[name] = row["error"]
    yield judge(errors)


def judge(errors: dict[str, float]) -> Verdict:
    wrong = [f"{name} differs from float32 by {error:.2g}" for name, error in errors.items() if not error <= TOLERANCE]
    if wrong or not errors:
        return Verdict("attention", False, "; ".join(wrong) or "no backend ran")
    return Verdict("attention", True, f"{len(errors)} cases, errors at most {max(errors.values()):.2g} of {TOLERANCE}")


def measure(shape: Shape, rates: Accelerator | None, pace: Pace) -> Table:
    rng = np.random.default_rng(0)
    sizes = [(shape.batch, heads, shape.length, shape.width) for heads in (shape.heads, shape.kv_heads)]
    q, d = (jnp.asarray(rng.normal(size=sizes[0]), jnp.bfloat16) for _ in range(2))
    k, v = (jnp.asarray(rng.normal(size=sizes[1]), jnp.bfloat16) for _ in range(2))
    ends = np.sort(rng.integers(1, shape.length, (shape.batch, DOCUMENTS - 1)))
    packed = (np.arange(shape.length) >= ends[..., None]).sum(1).astype(np.int32)
    rows, runs = [], {}
    for segments in (None, jnp.asarray(packed)):
        documents = 1 if segments is None else DOCUMENTS
        exact = exact_results(segments, shape, q, k, v, d)
        for backend in backends(shape, segments is not None):
            row: dict[str, Any] = {"backend": backend, "documents": documents}
            rows.append(row)
            if not pace.has_time:
                row["note"] = "no time left"
                continue
            try:
                compiled = attend(backend).lower(q, k, v, d, segments).compile()
                needed = memory_of(compiled, platform())["peak"]
                if needed > memory():
                    row["note"] = f"does not fit: {needed / 2**30:.0f} GiB"
                    continue
                found = samples(shape, *compiled(q, k, v, d, segments))
                row["error"] = float(np.max([apart(*pair) for pair in zip(found, exact, strict=True)]))
            except Exception as failure:  # reported in the table; the others continue
                row["failure"] = " ".join(str(failure).split())[:200]
                continue
            runs[backend, documents] = partial(compiled, q, k, v, d, segments)
            flops, size = work(shape, segments)
            row["bound"] = bound(flops, size, [], rates) if rates else {}
            row["TFLOP"] = flops / 1e12
    seconds = take_turns(runs, pace)
    return Table(
        f"Attention of one layer of {shape.name}, forward and backward: {shape.batch} x {shape.length} tokens, "
        f"{shape.heads} heads, {shape.kv_heads} of keys, width {shape.width}",
        [with_times(row, seconds.get((row["backend"], row["documents"]))) for row in rows],
    )


def with_times(row: dict[str, Any], seconds: float | None) -> dict[str, Any]:
    """The row with its time in place of its work."""
    limit, tflop = row.pop("bound", {}), row.pop("TFLOP", 0.0)
    if seconds is None:
        return row
    row |= {"ms": 1000 * seconds, "TFLOP/s": tflop / seconds}
    if limit:
        row |= {"bound, ms": 1000 * limit["total"], "limited by": limit["limited_by"]}
        row["share of the bound"] = f"{limit['total'] / seconds:.0%}"
    return row


def backends(shape: Shape, packs: bool) -> list[str]:
    """Those that this device has for this shape."""
    found = []
    for kernel in kernels():
        needs = AttentionNeeds(
            backend=kernel.name, features=frozenset({"segments"} if packs else ()), seq_len=shape.length
        )
        try:
            choose_attention(needs, platform(), device().device_kind)
        except UserError:
            continue
        found.append(kernel.name)
    return found


def attend(backend: str) -> Callable[..., Any]:
    """A function (q, k, v, gradient of the output, segments or None) -> output, gradients of q, k and v."""

    def forward_and_backward(q: jax.Array, k: jax.Array, v: jax.Array, d: jax.Array, segments: Any) -> Any:
        def mix(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return self_attend(backend, q, k, v, q.shape[-1] ** -0.5, segments=segments)

        mixed, pull_back = jax.vjp(mix, q, k, v)
        return mixed, *pull_back(d)

    return jax.jit(forward_and_backward)


def exact_results(segments: jax.Array | None, shape: Shape, *inputs: jax.Array) -> Any:
    """The results for the samples in float32."""
    given = [sample.astype(jnp.float32) for sample in samples(shape, *inputs)]
    with jax.default_matmul_precision("highest"):
        return attend(PLAIN)(*given, None if segments is None else segments[jnp.array([0, -1])])


def samples(shape: Shape, *arrays: jax.Array) -> list[jax.Array]:
    """Of the first sequence the first head of keys with its queries, of the last one the last: two sequences."""
    sizes = (array.shape[1] // shape.kv_heads for array in arrays)
    return [jnp.stack([array[0, :size], array[-1, -size:]]) for array, size in zip(arrays, sizes, strict=True)]


def apart(result: jax.Array, exact: jax.Array) -> float:
    result, exact = (np.asarray(x, np.float64) for x in (result, exact))
    return float(np.linalg.norm(result - exact) / np.linalg.norm(exact))


def work(shape: Shape, segments: jax.Array | None) -> tuple[float, float]:
    """FLOPs and bytes of the forward and the backward pass."""
    per_row = [[shape.length]] if segments is None else [np.bincount(row) for row in np.asarray(segments)]
    pairs = np.mean([sum(length * (length + 1) / 2 for length in row) for row in per_row])
    product = 2 * shape.batch * shape.heads * pairs * shape.width
    queries = 2 * shape.batch * shape.heads * shape.length * shape.width
    keys = queries / shape.heads * shape.kv_heads
    # q, output; then q, output, its gradient, q's gradient. k, v; then k, v, their gradients
    return 7 * product, 6 * queries + 6 * keys
