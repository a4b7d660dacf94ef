# shellcheck shell=bash
# The environment of a training run on NVIDIA GPUs. To be sourced: `. deploy/gpu/env.sh`. What you set yourself stays.

# JAX takes 75 % of the memory of a GPU unless told otherwise. The rest of the GPU is for CUDA, cuDNN and NCCL, which
# need a few GiB: 90 % is what NVIDIA's guide for JAX uses. Lower it if NCCL or cuDNN say that they cannot allocate.
# XLA_PYTHON_CLIENT_MEM_FRACTION is the old name; jax refuses to start if both are set.
if [ -z "${XLA_PYTHON_CLIENT_MEM_FRACTION:-}" ]; then
    export XLA_CLIENT_MEM_FRACTION="${XLA_CLIENT_MEM_FRACTION:-0.9}"
fi

# Options of XLA's compiler belong into `trainer.xla_options` of the config: they are logged and kept with the run.
# Left alone on purpose:
# * The latency-hiding scheduler: on by default in jax 0.10 and later; with its flag on, off or unset the program is the
#   same.
# * Command buffers (CUDA graphs), asynchronous collectives, their high-priority stream, Triton GEMMs with autotuning:
#   on by default too. If a driver has trouble with CUDA graphs: xla_gpu_enable_command_buffer: "".
# * JAX_OPTIMIZATION_LEVEL=O1 also pipelines collectives and unrolls loops, for more compile time and memory. Worth
#   a try on several nodes; we have not measured it.
# * xla_gpu_{all_gather,reduce_scatter,all_reduce}_combine_threshold_bytes: worth a try if a profile shows many small
#   collectives. The right size is that of one layer's parameters, so it is not one number for all models.
# * NCCL_*: NCCL chooses protocol, algorithm and network itself. Two are for the cluster, not for us: NCCL_SOCKET_IFNAME
#   where it picks the wrong interface, and NCCL_DEBUG=INFO to see what it picked.
# * CUDA_DEVICE_MAX_CONNECTIONS=1: helps on some Hopper machines and slows Blackwell.
# * xla_gpu_deterministic_ops: true: needed for resuming with the same bits on GPUs, and slower.
