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

from lmtrain.doctor.finding import Finding
from lmtrain.runtime.accelerators import find_accelerator
from lmtrain.runtime.machine import has_tpu
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
    if isinstance(gpus, str):
        yield Finding("nvidia", gpus, "BAD", "fix the NVIDIA driver first (restart the machine after an update)")
    elif gpus is not None:
        yield Finding("nvidia", f"{len(gpus)} x {gpus[0]}") if gpus else Finding("nvidia", "no GPU", "note")
    answer = _ask_jax()
    if isinstance(answer, str):
        held = "stop the process that uses the accelerator" if glob("/dev/accel*") or glob("/dev/vfio/*") else ""
        fix = held or "set JAX_PLATFORMS=cpu to run without accelerator"
        yield Finding("devices", f"JAX finds none: {answer}", "BAD", fix)
    else:
        yield from _jax(answer, has_gpu=isinstance(gpus, list) and bool(gpus))


def _nvidia() -> list[str] | str | None:
    """A line for each GPU, or the reason why there is none; None without NVIDIA's driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        return "nvidia-smi does not respond"
    if done.returncode:
        return ((done.stdout + done.stderr).strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def _ask_jax() -> dict[str, Any] | str:
    """JAX's report of its devices, or the reason why there is none."""
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "3", **os.environ}
    command = [sys.executable, "-c", _ASK]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, env=environment)
    except subprocess.TimeoutExpired:
        return f"no response within {_SECONDS:.0f} s"
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


def _jax(answer: dict[str, Any], has_gpu: bool) -> Iterator[Finding]:
    memory = f", {format_bytes(answer['memory'])} each" if answer["memory"] else ""
    seen = f"{answer['count']} x {answer['kind']} ({answer['backend']}{memory})"
    on_cpu, platforms = answer["backend"] == "cpu", os.environ.get("JAX_PLATFORMS", "")
    if not answer["right"]:
        fix = "do not train on it: the device or its driver is broken"
        yield Finding("devices", f"{seen}: wrong result of a small matrix product", "BAD", fix)
    elif on_cpu and has_gpu:
        install = "`pip install 'lmtrain[cuda12]'`, or 'lmtrain[cuda13]' with driver 580 or newer"
        fix = f"unset JAX_PLATFORMS, which is {platforms}" if platforms else install
        yield Finding("devices", f"{seen}: JAX does not use the GPU", "BAD", fix)
    elif on_cpu and has_tpu():
        fix = "`pip install 'lmtrain[tpu]'`, and JAX_PLATFORMS must not be cpu"
        yield Finding("devices", f"{seen}: JAX does not use the TPU", "BAD", fix)
    else:
        yield Finding("devices", seen)
        device = find_accelerator(answer["kind"])
        if device is None:
            yield Finding("peak", f"unknown for {answer['kind']}: MFU is not logged", "note")
        else:
            yield Finding("peak", f"{device.peak_flops / 1e12:,.0f} TFLOP/s each in 16 bits: the reference of MFU")
