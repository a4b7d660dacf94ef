# shellcheck shell=bash
# The environment of a training run on NVIDIA GPUs. Source it: `. deploy/gpu/env.sh`. Variables that are set stay.

# JAX reserves 75 % of the memory of a GPU by default. CUDA, cuDNN and NCCL use the rest and need a few GiB; 90 % is the
# value in NVIDIA's guide for JAX. Lower it if NCCL or cuDNN report that they cannot allocate memory.
# XLA_PYTHON_CLIENT_MEM_FRACTION is the old name; jax refuses to start if both are set.
if [ -z "${XLA_PYTHON_CLIENT_MEM_FRACTION:-}" ]; then
    export XLA_CLIENT_MEM_FRACTION="${XLA_CLIENT_MEM_FRACTION:-0.9}"
fi

# Set options of XLA's compiler in `trainer.xla_options` of the config: they are logged and stored with the run.
# Left at their defaults on purpose:
# * The latency-hiding scheduler: on by default in jax 0.10 and later; with its flag on, off or unset the program is the
#   same.
# * Command buffers (CUDA graphs), asynchronous collectives, their high-priority stream, Triton GEMMs with autotuning:
#   on by default too. If a driver fails with CUDA graphs: xla_gpu_enable_command_buffer: "".
# * JAX_OPTIMIZATION_LEVEL=O1 also pipelines collectives and unrolls loops, with more compile time and memory. Try it
#   on several nodes; not measured.
# * xla_gpu_{all_gather,reduce_scatter,all_reduce}_combine_threshold_bytes: try it if a profile shows many small
#   collectives. The right size is that of one layer's parameters, so it depends on the model.
# * NCCL_*: NCCL chooses protocol, algorithm and network. Two depend on the cluster: NCCL_SOCKET_IFNAME if it selects
#   the wrong interface, and NCCL_DEBUG=INFO to log what it selects.
# * CUDA_DEVICE_MAX_CONNECTIONS=1: helps on some Hopper machines and slows Blackwell.
# * xla_gpu_deterministic_ops: true: required for a bitwise identical resume on GPUs, and slower.
