"""Compiling without optimizing: programs this small run for microseconds, what takes time is making them fast."""

import functools

import jax

jit = functools.partial(
    jax.jit,
    compiler_options={
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
        "xla_cpu_use_fusion_emitters": False,
    },
)
