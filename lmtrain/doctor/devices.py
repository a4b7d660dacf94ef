"""The accelerators: what the driver has, what JAX finds, and whether it computes.

JAX is asked in a process of its own, which is ended if it does not answer: a TPU that another process holds, or a
driver that hangs, would hold this one too.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from glob import glob
from typing import Any

from lmtrain.doctor.finding import Finding, State
from lmtrain.runtime.accelerators import find_accelerator, has_tpu
from lmtrain.runtime.progress import format_bytes

_SECONDS = 120.0

_ASK = """
import json, jax, jax.numpy as jnp
device = jax.devices()[0]
x = jnp.arange(16.0).reshape(4, 4)
right = bool((jax.jit(lambda x: x @ x)(x) == jnp.asarray([[sum(float(4 * i + k) * (4 * k + j) for k in range(4))
                                                        for j in range(4)] for i in range(4)])).all())
stats = device.memory_stats() or {}
print(json.dumps({"backend": jax.default_backend(), "kind": device.device_kind, "count": jax.local_device_count(),
                  "memory": stats.get("bytes_limit"), "right": right}))
"""


def look_at_devices() -> Iterator[Finding]:
    """Accelerators, as their drivers and as JAX see them."""
    gpus = _nvidia()
    yield from gpus
    found = _ask_jax()
    yield from _jax(found, has_gpu=any(finding.what == "nvidia" and finding.state is State.OK for finding in gpus))


def _nvidia() -> list[Finding]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        done = None
    if done is None or done.returncode:
        reason = "nvidia-smi does not answer" if done is None else (done.stdout + done.stderr).strip().splitlines()[-1:]
        text = reason if isinstance(reason, str) else " ".join(reason)
        return [
            Finding(
                "nvidia",
                text,
                State.BAD,
                "fix the NVIDIA driver first (restart the machine after an update)",
            )
        ]
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return [Finding("nvidia", f"{len(lines)} x {lines[0]}" if lines else "no GPU", State.OK if lines else State.NOTE)]


def _ask_jax() -> dict[str, Any] | str:
    """What JAX says of its devices, or why it says nothing."""
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "3", **os.environ}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK], capture_output=True, text=True, timeout=_SECONDS, env=environment
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {_SECONDS:.0f} s"
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        told = done.stderr.strip().splitlines()
        return told[-1] if told else f"exit code {done.returncode}"
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


def _jax(found: dict[str, Any] | str, has_gpu: bool) -> Iterator[Finding]:
    if isinstance(found, str):
        held = "end the process that holds the accelerator" if glob("/dev/accel*") or glob("/dev/vfio/*") else ""
        yield Finding(
            "devices", f"JAX finds none: {found}", State.BAD, held or "JAX_PLATFORMS=cpu runs without an accelerator"
        )
        return
    memory = f", {format_bytes(found['memory'])} each" if found["memory"] else ""
    seen = f"{found['count']} x {found['kind']} ({found['backend']}{memory})"
    if not found["right"]:
        yield Finding(
            "devices",
            f"{seen}: a small matrix product came out wrong",
            State.BAD,
            "do not train on it: the device or its driver is broken",
        )
        return
    if found["backend"] == "cpu" and has_gpu:
        asked = os.environ.get("JAX_PLATFORMS", "")
        mend = (
            f"unset JAX_PLATFORMS, which is {asked}"
            if asked
            else "`pip install 'lmtrain[cuda12]'` or, with a driver from 580 on, 'lmtrain[cuda13]'"
        )
        yield Finding("devices", f"{seen}: JAX does not use the GPU", State.BAD, mend)
        return
    if found["backend"] == "cpu" and has_tpu():
        yield Finding(
            "devices",
            f"{seen}: JAX does not use the TPU",
            State.BAD,
            "`pip install 'lmtrain[tpu]'`, and JAX_PLATFORMS must not be cpu",
        )
        return
    yield Finding("devices", seen)
    device = find_accelerator(found["kind"])
    if device is not None:
        yield Finding("peak", f"{device.peak_flops / 1e12:,.0f} TFLOP/s each in 16 bits: MFU is in percent of it")
    else:
        yield Finding("peak", f"not known of {found['kind']}: no MFU is logged", State.NOTE)
