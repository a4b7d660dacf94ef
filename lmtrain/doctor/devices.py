"""The accelerators: devices of the driver, devices that JAX finds, and a test computation.

JAX runs in a separate process, which is killed after a timeout: a TPU that another process uses, or a driver that
hangs, would block this process too.
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
    """Accelerators as reported by their drivers and by JAX."""
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
        reason = (
            "nvidia-smi does not respond" if done is None else (done.stdout + done.stderr).strip().splitlines()[-1:]
        )
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
    """JAX's report of its devices, or the reason why there is none."""
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "3", **os.environ}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK], capture_output=True, text=True, timeout=_SECONDS, env=environment
        )
    except subprocess.TimeoutExpired:
        return f"no response within {_SECONDS:.0f} s"
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        errors = done.stderr.strip().splitlines()
        return errors[-1] if errors else f"exit code {done.returncode}"
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


def _jax(found: dict[str, Any] | str, has_gpu: bool) -> Iterator[Finding]:
    if isinstance(found, str):
        held = "stop the process that uses the accelerator" if glob("/dev/accel*") or glob("/dev/vfio/*") else ""
        yield Finding(
            "devices", f"JAX finds none: {found}", State.BAD, held or "set JAX_PLATFORMS=cpu to run without accelerator"
        )
        return
    memory = f", {format_bytes(found['memory'])} each" if found["memory"] else ""
    seen = f"{found['count']} x {found['kind']} ({found['backend']}{memory})"
    if not found["right"]:
        yield Finding(
            "devices",
            f"{seen}: wrong result of a small matrix product",
            State.BAD,
            "do not train on it: the device or its driver is broken",
        )
        return
    if found["backend"] == "cpu" and has_gpu:
        platforms = os.environ.get("JAX_PLATFORMS", "")
        fix = (
            f"unset JAX_PLATFORMS, which is {platforms}"
            if platforms
            else "`pip install 'lmtrain[cuda12]'`, or 'lmtrain[cuda13]' with driver 580 or newer"
        )
        yield Finding("devices", f"{seen}: JAX does not use the GPU", State.BAD, fix)
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
        yield Finding("peak", f"{device.peak_flops / 1e12:,.0f} TFLOP/s each in 16 bits: the reference of MFU")
    else:
        yield Finding("peak", f"unknown for {found['kind']}: MFU is not logged", State.NOTE)
